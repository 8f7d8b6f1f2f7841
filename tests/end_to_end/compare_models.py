"""Tiny Transformers models, and both sides of a captured step, for the comparison's end-to-end tests."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

import trainfer

END = 63
PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23, 24, 25, 26, 27, 28]]
"""Mixed lengths; the first two are samples of one prompt."""

_SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 256, "pad_token_id": 0, "eos_token_id": END, "bos_token_id": None,
}  # fmt: skip
_CONFIGS = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mixtral": MixtralConfig,
}
ARCHITECTURES = (*_CONFIGS, "gpt2")


def make(architecture: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, attention: str = "eager"):
    """Random weights, scaled up so that logits are not flat."""
    if architecture == "gpt2":
        config = GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            pad_token_id=0, eos_token_id=END, bos_token_id=None,
        )  # fmt: skip
    else:
        more = {"head_dim": 8} if architecture in ("qwen3", "gemma2", "gemma3") else {}
        more |= {"num_local_experts": 4} if architecture == "mixtral" else {}
        config = _CONFIGS[architecture](**_SIZES, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(3.0)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


@torch.no_grad()
def generate(
    model,
    folder: Path,
    *,
    prompts=PROMPTS,
    new: int = 12,
    temperature: float = 1.0,
    recorded: str = "processed",
) -> tuple[list[list[int]], list[int]]:
    """A captured ``generate`` with a cache and left padding; gives sequences and prompt lengths."""
    length = max(map(len, prompts))
    ids = torch.zeros(len(prompts), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - len(prompt) :] = torch.tensor(prompt)
        mask[row, length - len(prompt) :] = 1
    with torch.random.fork_rng(devices=[]), trainfer.capture(model, folder, side="rollout") as cap:
        torch.manual_seed(1)
        out = model.generate(
            ids, attention_mask=mask, do_sample=True, max_new_tokens=new, temperature=temperature, top_k=0, top_p=1.0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        scale = temperature if recorded == "processed" else 1.0
        logprobs = torch.log_softmax(torch.stack(out.logits, 1).float() / scale, -1)
        sequences, values = [], []
        for row, prompt in enumerate(prompts):
            response = out.sequences[row, length:].tolist()
            response = response[: response.index(END) + 1] if END in response else response
            sequences.append(prompt + response)
            values.append([logprobs[row, step, token].item() for step, token in enumerate(response)])
        lengths = [len(prompt) for prompt in prompts]
        said = {"temperature": temperature, "top_p": 1.0, "top_k": -1}
        cap.record_logprobs(sequences=sequences, prompt_lengths=lengths, logprobs=values, sampling=said)
    return sequences, lengths


def _padded(sequences: Sequence[list[int]], side: str, extra: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, sequences)) + extra
    ids = torch.zeros(len(sequences), length, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        part = slice(0, len(sequence)) if side == "right" else slice(length - len(sequence), length)
        ids[row, part] = torch.tensor(sequence)
        mask[row, part] = 1
    return ids, mask


def forward(
    model, sequences: Sequence[list[int]], layout: str, *, positions: str = "mask", leak: bool = False
):
    """Logits ``[tokens, V]`` of each sequence, from one training forward."""
    if layout == "packed":
        ids = torch.tensor([[token for sequence in sequences for token in sequence]])
        places = torch.cat([torch.arange(len(sequence)) for sequence in sequences])[None]
        mask = torch.ones_like(ids) if leak else None
        logits = (
            model(input_ids=ids, position_ids=places, attention_mask=mask, use_cache=False).logits[0].float()
        )
        return list(logits.split([len(sequence) for sequence in sequences]))
    ids, mask = _padded(sequences, layout, extra=0 if positions == "arange" else 2)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    if positions == "arange":
        places = torch.arange(ids.shape[1])[None].expand_as(ids)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits.float()
    return [logits[row][mask[row].bool()] for row in range(len(sequences))]


@torch.no_grad()
def train(
    model,
    folder: Path,
    sequences: list[list[int]],
    lengths: list[int],
    *,
    layout: str = "right",
    temperature: float = 1.0,
    declared: float | None = None,
    micro: int | None = None,
    order: Sequence[int] | None = None,
    passes: int = 1,
    weights_version: int | None = None,
    **changes,
) -> None:
    """A captured log-prob pass over sequences, ``micro`` at a time in the given order."""
    order = list(order or range(len(sequences)))
    micro = micro or len(order)
    arguments = {"side": "train", "pass_name": "old_log_prob", "weights_version": weights_version}
    with trainfer.capture(model, folder, **arguments) as cap:
        for _ in range(passes):
            values = []
            for start in range(0, len(order), micro):
                chosen = order[start : start + micro]
                parts = forward(model, [sequences[i] for i in chosen], layout, **changes)
                for i, logits in zip(chosen, parts, strict=True):
                    logprobs = torch.log_softmax(logits / temperature, -1)
                    scored = range(lengths[i], len(sequences[i]))
                    values.append([logprobs[p - 1, sequences[i][p]].item() for p in scored])
        said = {"temperature": temperature if declared is None else declared}
        cap.record_logprobs(
            sequences=[sequences[i] for i in order],
            prompt_lengths=[lengths[i] for i in order],
            logprobs=values,
            sampling=said,
        )


def compare_step(rollout_model, train_model, folder: Path, **options):
    """Both captures and their comparison."""
    sequences, lengths = generate(rollout_model, folder / "rollout")
    train(train_model, folder / "train", sequences, lengths, **options)
    return trainfer.compare(folder / "rollout", folder / "train")
