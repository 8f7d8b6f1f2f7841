"""Pairs of dumps of tiny real models: generation with a cache against one padded forward pass."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

import trainfer
from trainfer.check.compare.joined import JoinedSides, join_sides
from trainfer.check.compare.source import DumpSide
from trainfer.check.replay.model import read_model
from trainfer.check.replay.records import ModuleReplay, Replay
from trainfer.check.replay.run import Replayer

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "llama": LlamaConfig(**SHAPE),
    "gpt2": GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=None, eos_token_id=None
    ),
    "gemma2": Gemma2Config(**SHAPE, head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, scaled up so that attention and logits are not flat."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    if name == "mixtral":
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


class Pair:
    """Two dumps: a rollout of a batch with a left-padded sequence, and its training forward pass."""

    def __init__(self, folder: Path) -> None:
        self.rollout, self.train = folder / "rollout", folder / "train"

    def joined(self) -> JoinedSides:
        return join_sides(DumpSide(self.rollout), DumpSide(self.train))

    def replayer(self, model: torch.nn.Module) -> Replayer:
        joined = self.joined()
        return Replayer(joined, read_model(model, joined))

    def replay(self, model: torch.nn.Module) -> Replay:
        return self.replayer(model).all()


def make_pair(
    folder: Path,
    rollout: PreTrainedModel,
    train: PreTrainedModel | None = None,
    *,
    inside: Callable[[], AbstractContextManager[object]] = nullcontext,
    seed: int = 0,
    new_tokens: int = 6,
    **options: object,
) -> Pair:
    """Capture both sides; ``inside`` is entered around each run, ``options`` go to both captures."""
    pair = Pair(folder)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 97, (3, 7), generator=generator)
    mask = torch.ones_like(prompts)
    mask[0, :3] = 0
    with trainfer.capture(rollout, pair.rollout, side="rollout", **options), inside(), torch.no_grad():  # pyright: ignore[reportArgumentType]
        tokens = rollout.generate(
            prompts,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
    assert isinstance(tokens, Tensor)
    whole = torch.cat([mask, torch.ones(3, new_tokens, dtype=mask.dtype)], dim=1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)
    model = train or rollout
    with trainfer.capture(model, pair.train, side="train", **options), inside(), torch.no_grad():  # pyright: ignore[reportArgumentType]
        model(input_ids=tokens, attention_mask=whole, position_ids=positions)
    return pair


def by_name(replay: Replay) -> dict[str, ModuleReplay]:
    return {module.module: module for module in replay.modules}


def worst(module: ModuleReplay) -> float:
    return float(max(module.introduced_rollout.max(), module.introduced_train.max()))


def beyond(replay: Replay) -> list[str]:
    """Modules that introduce more than their floor, in execution order."""
    return [
        module.module
        for module in sorted(replay.modules, key=lambda item: item.order)
        if max(module.factors) > 1.0
    ]
