"""How few rows a decode step may have is measured; SiLU keeps an element's bits at any number of threads."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.exact.activation import GRAIN, RoutedSiLU, route_activations, silu
from trainfer.exact.row_problems import decode_rows
from trainfer.exact.rules import MEASURED, ORDINARY, KeyLengths, using_key_lengths
from trainfer.integrations.transformers.load import tiny_model
from trainfer.types import GenerationRequest, SamplingParams


class SplitBelow(nn.Linear):
    """Sums in two halves where there are fewer rows than ``rows``; rounds once."""

    rows = 0

    def forward(self, input: Tensor) -> Tensor:
        rows, weight = input.float(), self.weight.float()
        half = rows.shape[-1] if rows.shape[-2] >= self.rows else rows.shape[-1] // 2
        product = F.linear(rows[..., :half], weight[:, :half])
        if half < rows.shape[-1]:
            product = product + F.linear(rows[..., half:], weight[:, half:])
        return (product if self.bias is None else product + self.bias.float()).to(input.dtype)


class SplitBelow3(SplitBelow):
    rows = 3


class SplitBelow5(SplitBelow):
    rows = 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("planted", "expected"), [(SplitBelow3, 4), (SplitBelow5, 8)])
def test_what_half_precision_rounds_away_is_found_too(planted, expected, dtype, bitwise):
    """Another order of summation changes one element in thousands there: few sums of random numbers show it."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = tiny_model("qwen2").to(dtype)
        model.get_submodule("model.layers.1.self_attn.v_proj").__class__ = planted
        assert decode_rows(model) >= expected or not bitwise


@pytest.mark.parametrize(("planted", "expected"), [(None, 2), (SplitBelow3, 4), (SplitBelow5, 8)])
def test_the_smallest_multiple_that_keeps_every_bit_is_found(planted, expected, bitwise):
    model = tiny_model("qwen2")
    if planted is not None:
        model.get_submodule("model.layers.1.mlp.down_proj").__class__ = planted
    found = decode_rows(model)
    assert found == expected or (not bitwise and found in (2, 4, 8))


def test_a_batch_of_any_size_decodes_to_the_same_bits(bitwise):
    model = tiny_model("qwen3")
    requests = [
        GenerationRequest(
            request_id=str(n),
            prompt_ids=tuple(range(5 + n, 9 + 2 * n)),
            seed=n,
            sampling=SamplingParams(max_new_tokens=9 + n),
        )
        for n in range(7)
    ]
    results = []
    for rows, batch in ((8, 7), (2, 7), (2, 3), (2, 1), (4, 5)):
        with using_key_lengths(KeyLengths(safe=MEASURED.safe, decode_rows=rows)):
            engine = make_engine("builtin", model=model, limits=EngineLimits(max_num_seqs=batch))
            results.append([(c.token_ids, c.logprobs) for c in engine.generate(requests)])
    assert all(result == results[0] for result in results[1:]) or not bitwise


@pytest.mark.parametrize(("rules", "expected"), [(ORDINARY, 3), (KeyLengths(safe=(512,), decode_rows=2), 4)])
def test_dummy_rows_are_no_more_than_asked_for(rules, expected):
    model = tiny_model("gpt2")
    rows: list[int] = []
    model.transformer.wte.register_forward_hook(lambda _m, args, _o: rows.append(args[0].numel()))
    requests = [
        GenerationRequest(
            request_id=str(n), prompt_ids=(5, 6, 7), seed=n, sampling=SamplingParams(max_new_tokens=4)
        )
        for n in range(3)
    ]
    with using_key_lengths(rules):
        make_engine("builtin", model=model).generate(requests)
    assert rows[1:] == [expected] * 3


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [3, 4, 5, 7])
def test_silu_keeps_an_elements_bits_at_any_number_of_threads(threads, count):
    values = torch.randn(608, 768, generator=torch.Generator().manual_seed(1)) * 4
    torch.set_num_threads(1)
    expected = F.silu(values)
    torch.set_num_threads(count)
    assert torch.equal(silu(values), expected)
    for rows in (8, 48, 128, 200, 344):
        assert torch.equal(silu(values[:rows]), expected[:rows])


def test_gradients_of_pieces_are_those_of_the_whole(threads):
    torch.set_num_threads(3)
    values = torch.randn(4 * GRAIN + 96, generator=torch.Generator().manual_seed(2))
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(3))
    ours, theirs = (values.clone().requires_grad_() for _ in range(2))
    (silu(ours) * weights).sum().backward()
    (F.silu(theirs) * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-6)


def test_silu_modules_are_routed_and_others_left_alone():
    model = nn.Sequential(nn.SiLU(), nn.GELU(), nn.SiLU(inplace=True), nn.Linear(2, 2))
    assert route_activations(model) == 1
    assert [type(part).__name__ for part in model] == ["RoutedSiLU", "GELU", "SiLU", "Linear"]
    assert type(tiny_model("llama").model.layers[0].mlp.act_fn) is RoutedSiLU
