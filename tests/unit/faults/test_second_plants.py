"""Each plant of the second generator changes the modules and rows that it says, and nothing else."""

from collections.abc import Iterable

import pytest
import torch
from second_cases import calls_of, changed, differing, planted, sequences, tensors

from trainfer.errors import ConfigError
from trainfer.faults import catalogue
from trainfer.faults.catalogue import chosen_faults
from trainfer.faults.fault import Fault
from trainfer.faults.generators import Generator, controls_of, faults_of
from trainfer.faults.models import LAYERS
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, family
from trainfer.faults.second import same
from trainfer.faults.second.planted import CONTROLS, FAULTS
from trainfer.faults.sides import run_pair, train_forward

LAYER0, LAYER1 = "model.layers.0", "model.layers.1"
EACH = ("model.layers.0.{}", "model.layers.1.{}")

DIFFERING: dict[str, tuple[str, ...]] = {
    "weights.stale/second_bucket": (
        *(f"{LAYER1}.self_attn.{part}_proj" for part in "qkvo"), f"{LAYER1}.input_layernorm",
        f"{LAYER1}.post_attention_layernorm", *(f"{LAYER1}.mlp.{part}_proj" for part in ("gate", "up", "down")),
        "model.norm", "lm_head",
    ),
    "weights.stale/shard": ("{layer}.mlp.down_proj",),
    "weights.missing/norms": (*(each.format("self_attn.q_norm") for each in EACH), *(each.format("self_attn.k_norm") for each in EACH)),
    "weights.missing/biases": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qkv"),
    "weights.tied_head/optimiser": ("lm_head",),
    "weights.fused_copy/gate_up": tuple(each.format(f"mlp.{part}_proj") for each in EACH for part in ("gate", "up")),
    "weights.cached_copy/fused_qkv": tuple(f"{{layer}}.self_attn.{part}_proj" for part in "qkv"),
    "weights.cached_copy/head": ("lm_head",),
    "weights.buffer/half": ("model.rotary_emb",),
    "weights.adapter_missing/one_layer": ("{layer}.self_attn.q_proj", "{layer}.self_attn.v_proj"),
    "weights.adapter_missing/switched_off": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qv"),
    "weights.adapter_scale/alpha_ignored": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qv"),
    "weights.adapter_scale/root_of_rank": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qv"),
    "head.adapter/left_out": ("lm_head",),
    "weights.rounded_merge/cycles": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qv"),
    "mode.dropout/adapter": tuple(each.format(f"self_attn.{part}_proj") for each in EACH for part in "qv"),
    "rope.scaling/llama3": ("model.rotary_emb",),
    "rope.scaling/yarn": ("model.rotary_emb",),
    "rope.scaling/interleaved": ("model.rotary_emb",),
    "rope.dtype/half_table": ("model.rotary_emb",),
    "rope.dtype/half_frequencies": ("model.rotary_emb",),
    "rope.positions/clamped": ("model.rotary_emb",),
    "rope.positions/learned_offset": ("transformer.wpe",),
    "attention.mask/one_ahead": ("{layer}.self_attn",),
    "attention.mask/weak": ("{layer}.self_attn",),
    "attention.cross_sequence/neighbour": ("{layer}.self_attn",),
    "attention.softcap/clamped": ("{layer}.self_attn",),
    "attention.softcap/no_layer": (f"{LAYER0}.self_attn", f"{LAYER1}.self_attn"),
    "attention.merge/no_rescale": ("{layer}.self_attn",),
    "attention.backend/weights_fp8": ("{layer}.self_attn",),
    "attention.backend/blocks": ("{layer}.self_attn",),
    "norm.eps/layer_norm": ("{layer}.ln_1",),
    "norm.eps/query_key": tuple(each.format(f"self_attn.{part}_norm") for each in EACH for part in "qk"),
    "norm.precision/root": ("{layer}.post_attention_layernorm",),
    "norm.precision/layer_norm": ("{layer}.ln_2",),
    "head.dtype/hidden": ("lm_head",),
    "head.dtype/half": ("lm_head",),
    "head.padded_vocab/resized": ("lm_head",),
    "head.padded_vocab/memory": ("lm_head",),
    "module.unknown/exact_gelu": ("{layer}.mlp.{act}",),
    "module.unknown/swapped": ("{layer}.mlp",),
    "module.unknown/residual": ("{layer}",),
    "module.unknown/embedding_scale": ("model.embed_tokens",),
    "moe.routing/slots": ("{layer}.mlp.gate",),
    "moe.routing/replay": ("{layer}.mlp.gate",),
    "mode.dropout/one_module": ("{layer}.mlp.dropout",),
    "policy.staleness/behind": (
        *(f"{LAYER1}.self_attn.{part}_proj" for part in "qkvo"), f"{LAYER1}.input_layernorm",
        f"{LAYER1}.post_attention_layernorm", *(f"{LAYER1}.mlp.{part}_proj" for part in ("gate", "up", "down")),
        "lm_head",
    ),
}  # fmt: skip
"""Fault -> the modules that, given equal inputs, have other outputs and hold no smaller such module."""

EVERY_NORM = ("norm.eps/forgotten", "norm.cast_order/llama_in_gemma")
OUTSIDE = {"policy.staleness"}
"""Causes with module differences and no module to name."""
NO_MODULE_DIFFERS = tuple(
    name
    for name, fault in FAULTS.items()
    if family(fault.cause) in ("tokens", "logprob", "kv_cache") and "/" in name
)


def tolerance_of(name: str) -> float:
    """Adapters are applied by other sums than merged weights; all else is the same arithmetic."""
    return 1e-5 if "adapter" in name or name == "weights.rounded_merge/cycles" else 0.0


def layer_of(pair: Pair) -> str:
    return f"{'transformer.h' if pair.case.architecture == 'gpt2' else 'model.layers'}.{pair.case.layer}"


@pytest.mark.parametrize(
    ("name", "side"), [(name, side) for name in DIFFERING for side in FAULTS[name].sides]
)
def test_named_modules_alone_differ_on_equal_inputs(name, side):
    if "adapter" in name or name == "weights.rounded_merge/cycles":
        pytest.importorskip("peft")
    pair, expected = planted(name, side=side)
    found = differing(pair, tolerance_of(name))
    act = "act" if pair.case.architecture == "gpt2" else "act_fn"
    wanted = {module.format(layer=layer_of(pair), act=act) for module in DIFFERING[name]}
    assert set(found) == wanted
    if expected[0].cause not in OUTSIDE:
        assert found[0] in expected[0].modules


@pytest.mark.parametrize("name", EVERY_NORM)
def test_every_norm_and_nothing_else_differs(name):
    pair, expected = planted(name)
    found = differing(pair, 0.0)
    assert found[0] == expected[0].modules[0]
    assert all(module.rpartition(".")[2].endswith("norm") for module in found)
    assert len(found) > LAYERS


@pytest.mark.parametrize("name", ["shape.parallel/two_ranks", "shape.batch/split_sums"])
def test_sums_differ_by_rounding_only(name):
    pair, expected = planted(name)
    found = differing(pair, 0.0)
    assert found[0] == expected[0].modules[0]
    assert {module.rpartition(".")[2] for module in found} <= {
        "o_proj",
        "down_proj",
        "q_proj",
        "k_proj",
        "v_proj",
    }
    assert differing(pair, 1e-5) == []


@pytest.mark.parametrize("name", NO_MODULE_DIFFERS)
def test_faults_outside_modules_change_no_module(name):
    pair, _ = planted(name)
    if "stale_prefix" not in name:
        assert differing(pair, 0.0) == []
    for first, second in zip(pair.rollout_model.parameters(), pair.train_model.parameters(), strict=True):
        assert torch.equal(first, second)


ROWS = (
    ("rope.positions/clamped", "model.rotary_emb"),
    ("rope.positions/learned_offset", "transformer.wpe"),
    ("attention.mask/one_ahead", "{layer}.self_attn"),
    ("attention.cross_sequence/neighbour", "{layer}.self_attn"),
    ("attention.window/wider", f"{LAYER0}.self_attn"),
    ("attention.window/every_layer", f"{LAYER1}.self_attn"),
    ("attention.merge/no_rescale", "{layer}.self_attn"),
)


@pytest.mark.parametrize(("name", "module"), ROWS)
def test_named_rows_alone_change(name, module):
    layout = "packed" if "packed" in FAULTS[name].layouts else "right"
    pair, expected = planted(name, side="train")
    pair.train.layout = layout
    module = module.format(layer=layer_of(pair))
    outputs = []
    for model in (pair.rollout_model, pair.train_model):
        calls = [output for called, _, _, output in calls_of(model, pair) if called == module]
        outputs.append(tensors(calls[0])[0])
    own = sequences()
    batch = Batch(tokens=own, prompt_lengths=tuple(3 for _ in own))
    rows = ((outputs[0] - outputs[1]).abs() > 1e-6).any(-1)
    if rows.dim() == 2 and rows.shape[0] == 1:
        starts = [sum(map(len, own[:index])) for index in range(len(own))]
        found = {(s, p) for s, p in batch.rows() if rows[0, starts[s] + p]}
    else:
        found = {(s, p) for s, p in batch.rows() if rows[s, p]}
    first_layer_inputs_equal = module.startswith((LAYER0, "transformer.wpe", "model.rotary"))
    assert expected[0].tokens is not None
    wanted = expected[0].tokens(batch)
    assert found == wanted if first_layer_inputs_equal or pair.case.layer == 0 else found <= wanted
    assert found


def test_weak_masks_let_a_little_through():
    large, small = (
        planted("attention.mask/weak", side="train", layer=0, magnitude=size)[0] for size in (3.0, 12.0)
    )
    gaps = []
    for pair in (large, small):
        logits = [
            train_forward(model, sequences(), pair)[0].detach()
            for model in (pair.rollout_model, pair.train_model)
        ]
        gaps.append(float((logits[0] - logits[1]).abs().max()))
    assert gaps[0] > gaps[1] > 0


def test_decode_counts_from_one_and_prefill_from_zero():
    pair, expected, rollout, _ = changed("rope.positions/decode_ahead", "rollout")
    rotary = pair.rollout_model.get_submodule("model.rotary_emb")
    clean = pair.train_model.get_submodule("model.rotary_emb")
    hidden, places = torch.zeros(1, 3, 32), torch.tensor([[0, 1, 2]])
    assert torch.equal(rotary(hidden, places)[0], clean(hidden, places)[0])
    assert torch.equal(rotary(hidden[:, :1], places[:, 1:2])[0], clean(hidden[:, :1], places[:, 2:3])[0])
    assert expected[0].tokens is not None
    assert expected[0].tokens(rollout.batch) == rollout.batch.rows() & rollout.batch.responses()


# --- the set as a whole ----------------------------------------------------------------------------------------------


def names(faults: Iterable[Fault]) -> set[str]:
    return {fault.name for fault in faults}


def test_the_second_generator_is_wide_and_shares_no_name_with_the_first():
    assert len(FAULTS) >= 40
    assert len({fault.cause for fault in FAULTS.values() if family(fault.cause) != "stack"}) >= 25
    assert len(CONTROLS) >= 5
    assert not names(FAULTS.values()) & names(catalogue.FAULTS.values())
    assert {fault.cause for fault in FAULTS.values()} - {"stack.two"} <= {
        fault.cause for fault in catalogue.FAULTS.values()
    }
    assert names(faults_of(Generator.BOTH).values()) == names(FAULTS.values()) | names(
        catalogue.FAULTS.values()
    )
    assert len(controls_of(Generator.BOTH)) == len(CONTROLS) + len(controls_of(Generator.FIRST))


def test_every_fault_is_held_against_what_it_says():
    held = {*DIFFERING, *EVERY_NORM, *NO_MODULE_DIFFERS, "shape.parallel/two_ranks", "shape.batch/split_sums"}
    rows = {name for name, _ in ROWS}
    apart = {"weights.stale/rollback", "rope.positions/decode_ahead"}
    stacks = {name for name in FAULTS if name.startswith("stack.")}
    assert held | rows | apart | stacks == set(FAULTS)


def test_only_picks_from_the_chosen_generator():
    assert names(chosen_faults("rope", FAULTS)) == {name for name in FAULTS if name.startswith("rope.")}
    with pytest.raises(ConfigError, match="no fault of the suite"):
        chosen_faults("norm.eps/one", FAULTS)


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("stack.")])
def test_stacks_plant_two_causes(name):
    pair, expected = planted(name)
    assert len({item.cause for item in expected}) == 2
    found = differing(pair, 0.0)
    assert set(found) == {module for item in expected for module in item.modules}


@pytest.mark.parametrize("control", same.SAME, ids=lambda control: control.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_controls_compute_the_same_function(control, seed):
    if control.name == "S7 adapter":
        pytest.importorskip("peft")
    pair = same.make(control.name, seed, control.architectures, ("float32",))
    control.change(pair)
    rollout, train = run_pair(pair)[-1]
    for mine, other in zip(rollout.logprobs, train.logprobs, strict=True):
        assert mine == pytest.approx(other, abs=5e-6)
