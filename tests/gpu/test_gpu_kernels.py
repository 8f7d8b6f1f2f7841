"""Each CUDA operator: its rows have the same bits in any batch, and it computes what it says."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from trainfer.exact.attention import AttentionForm
from trainfer.exact.fingerprint import fingerprints, partial_fingerprint
from trainfer.exact.gpu_attention import decode_forward
from trainfer.exact.gpu_fused import rope_and_store
from trainfer.exact.gpu_linear import (
    LARGE_TILE,
    SMALL_TILES,
    Shape,
    calibrate,
    linear,
    route_of,
    tile_product,
)
from trainfer.exact.gpu_norm import add_norm, rms_norm
from trainfer.exact.gpu_plan import gpu_plan
from trainfer.exact.gpu_rows import rotate, silu_product
from trainfer.exact.gpu_scores import row_scores
from trainfer.exact.layout import lay_out
from trainfer.exact.plan import plan_layout
from trainfer.exact.scores import scores_of_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16
PAGE = 64


def random(*sizes: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*sizes, generator=generator, device="cuda").to(dtype)


def form(size: int) -> AttentionForm:
    return AttentionForm(layer=0, scale=size**-0.5, window=None, softcap=None, dropout=0.0)


@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 8, 128), (9, 3, 64), (4, 4, 64), (32, 2, 128)])
def test_decode_rows_equal_packed_rows(heads, groups, size):
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 1000, 1100]
    layout = lay_out([[1] * n for n in lengths], None)
    rows = -(-layout.num_rows // 8) * 8
    query, key, value = (random(rows, h, size, seed=i) for i, h in enumerate((heads, groups, groups)))
    packed = gpu_plan(layout, device="cuda", row_multiple=8).attend(query, key, value, form(size))
    pages = -(-max(lengths) // PAGE)
    order = torch.randperm(len(lengths) * pages) + 1
    table = order.view(len(lengths), pages).to(torch.int32).cuda()
    keys = torch.zeros((len(lengths) * pages + 1) * PAGE, groups, size, dtype=BF16, device="cuda")
    values = torch.zeros_like(keys)
    for slot, item in enumerate(layout.sequences):
        place = torch.arange(item.length, device="cuda")
        cache_rows = table[slot, place // PAGE].long() * PAGE + place % PAGE
        keys[cache_rows] = key[item.own_start : item.own_start + item.length]
        values[cache_rows] = value[item.own_start : item.own_start + item.length]
    for back in (1, 2, 40):  # the last row, the one before, one in the middle
        positions = torch.tensor([max(0, n - back) for n in lengths], device="cuda")
        at = torch.tensor([item.own_start for item in layout.sequences], device="cuda") + positions
        decoded = decode_forward(
            query[at].contiguous(), keys, values, table, positions, size**-0.5, page=PAGE
        )
        assert torch.equal(decoded, packed[at])


@pytest.mark.parametrize("shared", [False, True])
def test_packed_attention_and_its_gradient_are_those_of_float32(shared):
    prompt = [1] * 100
    sequences = [prompt + [2] * 30, prompt + [3] * 77, [4] * 5, [*prompt, 5], [6] * 200]
    layout = lay_out(sequences, [100, 100, 2, 100, 50] if shared else None)
    rows = -(-layout.num_rows // 8) * 8
    inputs = [random(rows, h, 64, seed=i).requires_grad_() for i, h in enumerate((8, 4, 4))]
    exact = [tensor.detach().float().requires_grad_() for tensor in inputs]
    out = gpu_plan(layout, device="cuda", row_multiple=8).attend(*inputs, form(64))
    expected = plan_layout(layout, device="cuda", row_multiple=8).attend(*exact, form(64))
    number = layout.num_rows
    gradient = random(number, 8, 64, seed=9)
    out[:number].backward(gradient)
    expected[:number].backward(gradient.float())
    assert relative(out[:number], expected[:number]) < 1e-2
    for ours, theirs in zip(inputs, exact, strict=True):
        assert relative(ours.grad[:number], theirs.grad[:number]) < 1e-2


def relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    value, reference = value.detach().double(), reference.detach().double()
    assert torch.isfinite(value).all()
    return float((value - reference).norm() / reference.norm())


@pytest.mark.parametrize(
    ("outputs", "inner"),
    [(2048, 1024), (4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (32000, 1024), (576, 1536)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linears_rows_have_the_same_bits_at_every_number_of_rows(outputs, inner, has_bias):
    rows, weight = random(8192, inner, seed=1), random(outputs, inner, seed=2) * inner**-0.5
    bias = random(outputs, seed=3) if has_bias else None
    full = linear(rows, weight, bias)
    for count in (1, 2, 3, 7, 8, 24, 63, 64, 100, 128, 136, 200, 256, 264, 511, 1000, 5000):
        assert torch.equal(linear(rows[:count], weight, bias), full[:count]), count
    assert torch.equal(linear(rows[777:841], weight, bias), full[777:841])
    assert (
        relative(full, F.linear(rows.double(), weight.double(), None if bias is None else bias.double()))
        < 1e-2
    )


def test_calibration_finds_the_split_inner_axis_and_an_equal_tile():
    route = route_of(random(1024, 3072), has_bias=False)
    assert route.unequal_rows
    assert route.tile in (*SMALL_TILES, LARGE_TILE)


def test_calibration_keeps_the_library_where_rows_are_equal():
    route = calibrate(Shape(outputs=2048, inner=1024, has_bias=False, dtype=BF16, device=0))
    assert route.tile is None
    assert not route.unequal_rows


def test_every_tile_gives_the_same_bits():
    rows, weight = random(300, 3072, seed=1), random(1024, 3072, seed=2) * 0.02
    results = [tile_product(rows, weight, None, tile) for tile in (*SMALL_TILES, LARGE_TILE)]
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("width", [64, 128, 576, 1024, 4096])
def test_norm_rows_are_transformers_up_to_the_order_of_summation(width):
    rows, added, weight = random(1000, width, seed=1), random(1000, width, seed=2), random(width, seed=3)
    stock = Qwen3RMSNorm(width).to(device="cuda", dtype=BF16)
    stock.weight.data.copy_(weight)
    ours = rms_norm(rows, weight, 1e-6)
    assert (ours == stock(rows)).float().mean() > 0.999
    normed, total = add_norm(rows, added, weight, 1e-6)
    assert torch.equal(total, rows + added)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))
    assert torch.equal(rms_norm(rows[5:6], weight, 1e-6), ours[5:6])
    leaf = rows.clone().requires_grad_()
    weight.requires_grad_()
    gradient = random(1000, width, seed=4)
    rms_norm(leaf, weight, 1e-6).backward(gradient)
    wide, wide_weight = rows.double().requires_grad_(), weight.detach().double().requires_grad_()
    (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * wide_weight).backward(gradient.double())
    assert relative(leaf.grad, wide.grad) < 1e-2
    assert relative(weight.grad, wide_weight.grad) < 1e-2


@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 8, 128), (9, 3, 64), (40, 8, 128)])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_store_equals_the_modules_operators(heads, groups, size, norms):
    slots = 24
    projected = random(slots, (heads + 2 * groups) * size, seed=1)
    angles = random(500, size // 2, seed=2, dtype=torch.float32).repeat(1, 2)
    cosines, sines = angles.cos().to(BF16), angles.sin().to(BF16)
    weights = (random(size, seed=3), random(size, seed=4)) if norms else None
    positions = torch.arange(slots, device="cuda") * 5
    table = (torch.arange(slots * 8, device="cuda", dtype=torch.int32) + 1).view(slots, 8)
    cache = tuple(
        torch.zeros((slots * 8 + 1) * PAGE, groups, size, dtype=BF16, device="cuda") for _ in range(2)
    )
    turned = rope_and_store(
        projected, positions, (cosines, sines), weights, 1e-6, table, cache, query_heads=heads, page=PAGE
    )
    query, key, value = projected.view(slots, -1, size).split([heads, groups, groups], dim=1)
    if weights is not None:
        query, key = rms_norm(query, weights[0], 1e-6), rms_norm(key, weights[1], 1e-6)
    query, key = (tensor.transpose(0, 1)[None] for tensor in (query, key))
    query, key = apply_rotary_pos_emb(query, key, cosines[positions][None], sines[positions][None])
    assert torch.equal(turned, query[0].transpose(0, 1))
    rows = table[torch.arange(slots), positions // PAGE].long() * PAGE + positions % PAGE
    assert torch.equal(cache[0][rows], key[0].transpose(0, 1))
    assert torch.equal(cache[1][rows], value)


def test_silu_equals_torch_for_every_bfloat16():
    bits = torch.arange(-32768, 32768, dtype=torch.int32, device="cuda").to(torch.int16)
    gate = bits.view(BF16)
    gate = gate[torch.isfinite(gate)]
    for factor in (1.0, 0.3):
        up = torch.full_like(gate, factor)
        ours = silu_product(gate, up)
        theirs = F.silu(gate) * up
        assert torch.equal(ours, theirs), (
            gate[ours != theirs][:5],
            ours[ours != theirs][:5],
            theirs[ours != theirs][:5],
        )


@pytest.mark.parametrize("vocabulary", [1000, 32000, 151936])
def test_scores_of_a_row_are_the_same_in_any_batch_and_those_of_float64(vocabulary):
    logits = random(300, vocabulary, seed=1) * 3
    targets = torch.randint(vocabulary, (300,), device="cuda")
    temperatures = torch.rand(300, device="cuda") + 0.5
    full = row_scores(logits, targets, temperatures)
    for part in (slice(0, 1), slice(7, 15), slice(100, 228)):
        assert torch.equal(row_scores(logits[part], targets[part], temperatures[part])[0], full[0][part])
    leaf, wide = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs, entropies = scores_of_logits(leaf, targets, temperatures, entropy_gradient=True)
    exact = (wide / temperatures[:, None].double()).log_softmax(-1)
    exact_logprobs, exact_entropies = exact.gather(1, targets[:, None])[:, 0], -(exact.exp() * exact).sum(-1)
    assert (logprobs - exact_logprobs).abs().max() < 1e-4
    assert (entropies - exact_entropies).abs().max() < 1e-4
    factors = random(300, seed=5, dtype=torch.float32)
    (logprobs @ factors + entropies.sum()).backward()
    (exact_logprobs @ factors.double() + exact_entropies.sum()).backward()
    assert relative(leaf.grad, wide.grad) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize(("count", "start"), [(1, 0), (5, 16383), (300_000, 0), (300_000, 12345)])
def test_fingerprint_sums_are_those_of_the_cpu(dtype, count, start):
    values = (torch.randn(count) * 100).to(dtype)
    expected = partial_fingerprint(values, start)
    assert torch.equal(partial_fingerprint(values.cuda(), start).cpu(), expected)


def test_silu_product_has_the_gradient_of_the_eager_operators():
    gate, up, gradient = (random(100, 3072, seed=i) for i in range(3))
    ours = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    theirs = [gate.double().requires_grad_(), up.double().requires_grad_()]
    silu_product(*ours).backward(gradient)
    (F.silu(theirs[0]) * theirs[1]).backward(gradient.double())
    for mine, exact in zip(ours, theirs, strict=True):
        assert relative(mine.grad, exact.grad) < 1e-2


@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 8, 128), (9, 3, 64), (40, 8, 128)])
def test_rotate_equals_transformers_and_so_does_its_gradient(heads, groups, size):
    rows = 200
    query, key = random(rows, heads, size, seed=1), random(rows, groups, size, seed=2)
    angles = random(rows, size // 2, seed=3, dtype=torch.float32).repeat(1, 2)
    cosines, sines = angles.cos().to(BF16), angles.sin().to(BF16)
    ours = [query.clone().requires_grad_(), key.clone().requires_grad_()]
    theirs = [query.clone().requires_grad_(), key.clone().requires_grad_()]
    turned = rotate(*ours, cosines, sines)
    expected = apply_rotary_pos_emb(*(t.transpose(0, 1)[None] for t in theirs), cosines[None], sines[None])
    for mine, other in zip(turned, expected, strict=True):
        assert torch.equal(mine, other[0].transpose(0, 1))
    gradients = [random(rows, heads, size, seed=4), random(rows, groups, size, seed=5)]
    torch.autograd.backward(turned, gradients)
    torch.autograd.backward(expected, [g.transpose(0, 1)[None] for g in gradients])
    for mine, other in zip(ours, theirs, strict=True):
        assert relative(mine.grad, other.grad) < 1e-2


def test_fingerprints_of_many_tensors_are_those_of_each():
    named = {
        str(i): (torch.randn(count) * 100).to(dtype)
        for i, (count, dtype) in enumerate(
            [
                (1, torch.bfloat16),
                (40_000, torch.bfloat16),
                (0, torch.float32),
                (16384, torch.int64),
                (70_000, torch.bool),
            ]
        )
    }
    on_device = {name: tensor.cuda() for name, tensor in named.items()}
    assert fingerprints(on_device.items()) == fingerprints(named.items())
