"""A small comparison with a planted fault and hostile texts, for the reports."""

from pathlib import Path

import torch
from torch import Tensor, nn

import trainfer
from trainfer.check.compare.source import DumpSide
from trainfer.check.diagnose import Diagnosis, diagnose

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "=cmd|' /C calc'!A0",
    "七十二 ✓",
    "\u2028\n\t",
]


class Mixer(nn.Module):
    """Causal mean over the rows before, as attention would be."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[None, :, None]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Mixer()
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class Toy(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.lm_head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def make_diagnosis(
    folder: Path, *, layers: int, length: int, fault: str | None, texts: dict[int, str]
) -> Diagnosis:
    torch.manual_seed(0)
    model = Toy(layers, 16, 32)
    sequences = [torch.randint(0, 32, (length,)).tolist(), torch.randint(0, 32, (length // 2,)).tolist()]
    prompt = length // 4
    for side in ("rollout", "train"):
        handle = None
        if side == "train" and fault is not None:
            handle = model.get_submodule(fault).register_forward_hook(lambda module, args, out: out * 1.02)
        with torch.no_grad(), trainfer.capture(model, folder / side, side=side, pass_name="prefill") as cap:
            values = []
            for ids in sequences:
                logprobs = torch.log_softmax(model(torch.tensor([ids]))[0], -1)
                values.append([logprobs[p - 1, ids[p]].item() for p in range(prompt, len(ids))])
            cap.record_logprobs(
                sequences=sequences, prompt_lengths=[prompt, prompt], logprobs=values, sampling={}
            )
        if handle is not None:
            handle.remove()
    return diagnose(DumpSide(folder / "rollout"), DumpSide(folder / "train"), texts=texts)
