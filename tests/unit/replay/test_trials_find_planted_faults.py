"""For each rule one fault built by hand: the trial names it, its parameter and its share; nothing fits what fits nothing."""

from pathlib import Path

import pytest
import torch
from planted_faults import attention, scores, search

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
NORM = "model.layers.1.post_attention_layernorm"


def one(trials):
    assert len(trials) == 1, [trial.cause for trial in trials]
    return trials[0]


def set_eps(model):
    model.get_submodule(NORM).variance_epsilon = 1e-2


@pytest.mark.parametrize("side", ["rollout", "train"])
def test_another_eps_is_read_off_the_rows_and_reproduces(tmp_path: Path, side: str):
    trial = one(search(tmp_path, set_eps, NORM, side=side))
    assert (trial.cause, trial.module, trial.side, trial.reproduced) == ("norm.eps", NORM, side, True)
    assert trial.parameters["eps"] == pytest.approx(1e-2, rel=1e-3)
    assert trial.error_after < 1e-6 < trial.error_before
    assert trial.share_explained == pytest.approx(1, abs=0.01)


def test_eps_beside_the_root_is_told_from_eps_under_it(tmp_path: Path):
    def plant(model):
        norm = model.get_submodule(NORM)
        norm.register_forward_hook(
            lambda m, a, out: m.weight * (a[0] / (a[0].square().mean(-1, keepdim=True).sqrt() + 1e-2))
        )

    trial = one(search(tmp_path, plant, NORM))
    assert trial.cause == "norm.eps"


def test_a_norm_in_bfloat16(tmp_path: Path):
    def plant(model):
        def low(m, a, out):
            x = a[0].bfloat16()
            return (m.weight.bfloat16() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))).float()

        model.get_submodule(NORM).register_forward_hook(low)

    assert one(search(tmp_path, plant, NORM)).cause == "norm.precision"


@pytest.mark.parametrize("what", ["the root", "its input and result"])
def test_a_norm_that_rounds_in_one_place(tmp_path: Path, what: str):
    def plant(model):
        def low(m, a, out):
            x = a[0] if what == "the root" else a[0].bfloat16().float()
            root = torch.rsqrt(x.square().mean(-1, keepdim=True) + m.variance_epsilon)
            if what == "the root":
                return m.weight * (x * root.bfloat16().float())
            return (m.weight * (x * root)).bfloat16().float()

        model.get_submodule(NORM).register_forward_hook(low)

    trial = one(search(tmp_path, plant, NORM))
    assert (trial.cause, trial.parameters["what"]) == ("norm.precision", what)


def test_rotary_tables_in_the_other_layout(tmp_path: Path):
    def plant(model):
        def twice(table):
            return table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1)

        model.model.rotary_emb.register_forward_hook(lambda m, a, out: tuple(twice(t) for t in out))

    assert one(search(tmp_path, plant, "model.rotary_emb")).cause == "rope.layout"


def test_rotary_tables_in_bfloat16(tmp_path: Path):
    def plant(model):
        model.model.rotary_emb.register_forward_hook(
            lambda m, a, out: tuple(t.bfloat16().float() for t in out)
        )

    trial = one(search(tmp_path, plant, "model.rotary_emb"))
    assert (trial.cause, trial.parameters["what"]) == ("rope.dtype", "the finished tables")


def test_another_rotary_base_and_factor(tmp_path: Path):
    def plant(model):
        rotary = model.model.rotary_emb
        rotary.register_buffer("inv_freq", rotary.inv_freq**1.05, persistent=False)
        rotary.attention_scaling = 1.3

    trial = one(search(tmp_path, plant, "model.rotary_emb"))
    assert trial.cause == "rope.scaling"
    assert trial.parameters["factor"] == pytest.approx(1.3, abs=1e-4)


def test_positions_that_start_at_three(tmp_path: Path):
    def plant(model):
        def later(m, args, kwargs):
            if "position_ids" in kwargs:
                return args, {**kwargs, "position_ids": kwargs["position_ids"] + 3}
            return (args[0], args[1] + 3), kwargs

        model.model.rotary_emb.register_forward_pre_hook(later, with_kwargs=True)

    trial = one(search(tmp_path, plant, "model.rotary_emb"))
    assert (trial.cause, trial.parameters["offset"]) == ("rope.positions", 3)


def window(module, q, k, v, mask, scaling):
    length = q.shape[2]
    far = torch.arange(length)[:, None] - torch.arange(length)[None] >= 7
    return scores(q, k, mask, scaling).masked_fill(far, -1e9).softmax(-1) @ v


def cap(module, q, k, v, mask, scaling):
    s = (q @ k.transpose(2, 3)) * scaling
    return (torch.tanh(s / 20) * 20 + mask).softmax(-1) @ v


def steeper(module, q, k, v, mask, scaling):
    return scores(q, k, mask, scaling * 1.2).softmax(-1) @ v


def float8(module, q, k, v, mask, scaling):
    k, v = (t.to(torch.float8_e4m3fn).float() for t in (k, v))
    return scores(q, k, mask, scaling).softmax(-1) @ v


def both_ways(module, q, k, v, mask, scaling):
    seen = mask[:, :, -1:] if mask is not None else 0
    return ((q @ k.transpose(2, 3)) * scaling + seen).softmax(-1) @ v


def low_weights(module, q, k, v, mask, scaling):
    return scores(q, k, mask, scaling).softmax(-1).bfloat16().float() @ v


def low_scores_and_weights(module, q, k, v, mask, scaling):
    low = scores(q, k, mask, scaling).clamp(min=-1e30).bfloat16()
    return low.softmax(-1).float() @ v


def low_inputs(module, q, k, v, mask, scaling):
    q, k, v = (t.bfloat16().float() for t in (q, k, v))
    return scores(q, k, mask, scaling).softmax(-1) @ v


def low_before_the_division(module, q, k, v, mask, scaling):
    s = scores(q, k, mask, scaling)
    parts = (s - s.amax(-1, keepdim=True)).exp()
    return parts.bfloat16().float() @ v / parts.sum(-1, keepdim=True)


def low_sums(module, q, k, v, mask, scaling):
    weights = scores(q, k, mask, scaling).softmax(-1)
    total = torch.zeros_like(q)
    for start in range(0, v.shape[2], 4):
        block = slice(start, start + 4)
        total = (total + weights[..., block] @ v[:, :, block]).bfloat16().float()
    return total


@pytest.mark.parametrize(
    ("change", "cause", "parameter"),
    [
        (window, "attention.window", ("window", 7)),
        (cap, "attention.softcap", ("softcap", 20)),
        (steeper, "attention.scale", ("scale", 1.2 * 8**-0.5)),
        (float8, "kv_cache.quantized", ("stored", "FP8 E4M3")),
        (both_ways, "attention.mask", None),
        (low_weights, "attention.backend", ("rounded", "weights are")),
        (low_scores_and_weights, "attention.backend", ("rounded", "scores and weights are")),
        (low_inputs, "attention.backend", ("rounded", "queries, keys and values are")),
        (low_before_the_division, "attention.backend", ("rounded", "weights before the division are")),
        (low_sums, "attention.backend", ("rounded", "the weighted sum, after every 4 keys, is")),
    ],
)
def test_attention_computed_otherwise(tmp_path: Path, change, cause: str, parameter):
    trial = one(search(tmp_path, attention(change, f"planted_{change.__name__}"), *LAYERS))
    assert (trial.cause, trial.modules, trial.reproduced) == (cause, LAYERS, True)
    if parameter is not None:
        found = trial.parameters[parameter[0]]
        assert (
            found == parameter[1]
            if isinstance(found, str)
            else found == pytest.approx(parameter[1], rel=1e-3)
        )
    assert trial.share_explained > 0.95


def test_wrong_weights_of_two_parts_of_the_context(tmp_path: Path):
    def merged(module, q, k, v, mask, scaling):
        s, split = scores(q, k, mask, scaling), 9
        late = torch.arange(q.shape[2])[:, None] >= split
        parts = [
            (s[..., :split].softmax(-1) @ v[..., :split, :]),
            (s[..., split:].softmax(-1) @ v[..., split:, :]),
        ]
        return torch.where(late, 0.5 * parts[0] + 0.5 * parts[1], s.softmax(-1) @ v)

    trial = one(search(tmp_path, attention(merged, "planted_merged"), *LAYERS))
    assert trial.cause == "attention.merge"


def test_dropout_on_attention_weights_with_its_rate(tmp_path: Path):
    def dropped(module, q, k, v, mask, scaling):
        torch.manual_seed(module.layer_idx)
        return torch.dropout(scores(q, k, mask, scaling).softmax(-1), 0.25, train=True) @ v

    trial = one(search(tmp_path, attention(dropped, "planted_dropped"), *LAYERS))
    assert trial.cause == "mode.dropout"
    assert trial.parameters["p"] == pytest.approx(0.25, abs=1e-3)


def test_packed_sequences_that_see_each_other_spare_the_first(tmp_path: Path):
    trial = one(search(tmp_path, lambda model: None, *LAYERS, packed=True, mask=False))
    assert trial.cause == "attention.cross_sequence"
    assert {sequence for sequence, _ in trial.tokens} == {1, 2}


def test_left_padding_that_is_seen(tmp_path: Path):
    def unmasked(module, q, k, v, mask, scaling):
        length = q.shape[2]
        later = torch.arange(length)[None] > torch.arange(length)[:, None]
        return ((q @ k.transpose(2, 3)) * scaling).masked_fill(later, -1e9).softmax(-1) @ v

    trial = one(search(tmp_path, attention(unmasked, "planted_unmasked"), *LAYERS))
    assert trial.cause == "attention.mask"
    assert {sequence for sequence, _ in trial.tokens} == {0, 2}, "the longest sequence has no padding"


def test_the_head_in_bfloat16(tmp_path: Path):
    def plant(model):
        model.lm_head.register_forward_hook(
            lambda m, a, out: (a[0].bfloat16() @ m.weight.bfloat16().T).float()
        )

    assert one(search(tmp_path, plant, "lm_head")).cause == "head.dtype"


def test_a_copy_of_a_weight_gives_itself_away(tmp_path: Path):
    name = "model.layers.0.mlp.gate_proj"

    def plant(model):
        layer = model.get_submodule(name)
        other = layer.weight.detach() * (
            1 + 0.01 * torch.randn(layer.weight.shape, generator=torch.manual_seed(0))
        )
        layer.register_forward_hook(lambda m, a, out: a[0] @ other.T)

    trial = one(search(tmp_path, plant, name))
    assert (trial.cause, trial.reproduced) == ("weights.cached_copy", True)


def test_what_nothing_explains_is_not_guessed(tmp_path: Path):
    def plant(model):
        model.model.layers[1].mlp.act_fn.register_forward_hook(
            lambda m, a, out: out + 0.01 * torch.sin(9 * out)
        )

    trial = one(search(tmp_path, plant, "model.layers.1.mlp.act_fn"))
    assert (trial.cause, trial.reproduced) == ("module.unknown", False)
    assert trial.module == "model.layers.1.mlp.act_fn"


def test_two_causes_come_out_in_the_order_of_execution(tmp_path: Path):
    def plant(model):
        set_eps(model)
        model.lm_head.register_forward_hook(lambda m, a, out: out.bfloat16().float())

    trials = search(tmp_path, plant, NORM, "lm_head")
    assert [trial.cause for trial in trials] == ["norm.eps", "head.dtype"]
    assert sum(trial.share_explained for trial in trials) == pytest.approx(1, abs=0.01)
