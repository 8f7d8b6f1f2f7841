"""Tiny Qwen3-shaped pairs with one thing done otherwise, for the trials' tests; built by hand, not by the fault suite."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trainfer
from trainfer.check.compare.joined import JoinedSides, join_sides
from trainfer.check.compare.source import DumpSide
from trainfer.check.replay.records import Trial
from trainfer.check.replay.suspects import Suspect
from trainfer.check.replay.trials import Search
from trainfer.check.replay.trials_bench import Bench

FLOOR = 1e-6
"""Far above float32's rounding in these widths, far below any planted fault."""

Fault = Callable[[nn.Module], object]


def make_model(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=128, tie_word_embeddings=False, attention_dropout=0.0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 4.0 if parameter.dim() >= 2 else 1.0
                parameter.mul_(scale).add_(torch.randn_like(parameter) * 0.02)
    return model.to(dtype)


def sequences() -> tuple[list[list[int]], list[int]]:
    generator = torch.Generator().manual_seed(5)
    found = [torch.randint(1, 64, (n,), generator=generator).tolist() for n in (14, 18, 11)]
    return found, [4, 6, 5]


@torch.no_grad()
def capture(model: nn.Module, folder: Path, side: str, *, packed: bool = False, mask: bool = True) -> None:
    """One forward over all sequences: padded on the left, or packed (without a mask, if so wanted)."""
    ids, lengths = sequences()
    with trainfer.capture(model, folder, side=side, pass_name="forward") as cap:
        if packed:
            rows = torch.tensor([[token for one in ids for token in one]])
            places = torch.cat([torch.arange(len(one)) for one in ids])[None]
            leak = None if mask else torch.ones_like(rows)
            logits = model(input_ids=rows, position_ids=places, attention_mask=leak, use_cache=False).logits[
                0
            ]
            parts = list(logits.split([len(one) for one in ids]))
        else:
            width = max(map(len, ids))
            rows, seen = torch.zeros(len(ids), width, dtype=torch.long), torch.zeros(len(ids), width)
            for number, one in enumerate(ids):
                rows[number, width - len(one) :] = torch.tensor(one)
                seen[number, width - len(one) :] = 1
            seen = seen.long()
            places = (seen.cumsum(1) - 1).clamp(min=0)
            logits = model(input_ids=rows, attention_mask=seen, position_ids=places, use_cache=False).logits
            parts = [logits[number, width - len(one) :] for number, one in enumerate(ids)]
        values = []
        for one, start, part in zip(ids, lengths, parts, strict=True):
            scored = torch.log_softmax(part.float(), -1)
            values.append([scored[place - 1, one[place]].item() for place in range(start, len(one))])
        cap.record_logprobs(
            sequences=ids, prompt_lengths=lengths, logprobs=values, sampling={"temperature": 1.0}
        )


def joined_pair(
    tmp_path: Path, fault: Fault, *, side: str = "rollout", packed: bool = False, mask: bool = True
) -> tuple[JoinedSides, nn.Module]:
    """A pair in which one side's copy of the model has the fault; packed and mask are the faulty side's."""
    model = make_model()
    bad = copy.deepcopy(model)
    fault(bad)
    good = "train" if side == "rollout" else "rollout"
    capture(bad, tmp_path / side, side, packed=packed, mask=mask)
    capture(model, tmp_path / good, good)
    return join_sides(DumpSide(tmp_path / "rollout"), DumpSide(tmp_path / "train")), model


def search(tmp_path: Path, fault: Fault, *modules: str, side: str = "rollout", **layout: bool) -> list[Trial]:
    """Trials when these modules are suspected on the faulty side."""
    joined, model = joined_pair(tmp_path, fault, side=side, **layout)
    number = ("rollout", "train").index(side)
    suspects = [Suspect(module=module, side=number, floor=FLOOR, factor=10.0) for module in modules]
    return list(Search(Bench(joined, model), suspects).run())


def attention(change: Callable[..., torch.Tensor], name: str) -> Fault:
    """All layers' attention computed by ``change(module, q, k, v, mask, scaling)`` (repeated keys) -> ``[B, H, T, K]``."""

    def run(module, query, key, value, attention_mask, scaling, **_):
        groups = module.num_key_value_groups
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
        out = change(module, query, key, value, attention_mask, scaling)
        return out.transpose(1, 2).contiguous(), None

    def plant(model: nn.Module) -> None:
        ALL_ATTENTION_FUNCTIONS.register(name, run)
        ALL_MASK_ATTENTION_FUNCTIONS.register(name, eager_mask)
        for config in (model.config, model.model.config):
            config._attn_implementation = name

    return plant


def scores(query, key, mask, scaling):
    """Masked scores."""
    return (query @ key.transpose(2, 3)) * scaling + (0 if mask is None else mask)
