"""A routed linear equals PyTorch's within rounding, and gives a row the same bits in any batch."""

import copy

import pytest
import torch
from torch import nn

from trainfer.exact.linear import RoutedLinear, linear, route_linears

SHAPES = [(256, 768), (768, 256), (130, 256), (64, 96)]


@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_thread_count(size_in: int, size_out: int):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size_out, size_in, generator=generator)
    bias = torch.randn(size_out, generator=generator)
    rows = torch.randn(600, size_in, generator=generator)
    whole = linear(rows, weight, bias)
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            for count in [*range(2, 40), 127, 128, 200, 513, 593]:
                assert torch.equal(linear(rows[7 : 7 + count], weight, bias), whole[7 : 7 + count]), count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_pytorch(with_bias: bool):
    torch.manual_seed(1)
    plain = nn.Linear(48, 80, bias=with_bias)
    routed = copy.deepcopy(plain)
    assert route_linears(nn.Sequential(routed)) == 1
    rows = torch.randn(2, 9, 48)
    results: list[list[torch.Tensor]] = []
    for layer in (plain, routed):
        given = rows.clone().requires_grad_()
        out = layer(given)
        (out.transpose(0, 1).square().sum()).backward()
        gradients = [parameter.grad for parameter in layer.parameters()]
        results.append([out.detach(), given.grad, *gradients])  # type: ignore[list-item]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_gradient_spread_from_one_number_is_right():
    rows = torch.ones(6, 4)
    layer = nn.Linear(4, 3, bias=False)
    route_linears(nn.Sequential(layer))
    layer(rows).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 6.0))


def test_bfloat16_and_subclasses_compute_as_before():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(Own(4, 4), nn.Linear(4, 4))
    assert route_linears(model) == 1
    assert type(model[0]) is Own
    assert type(model[1]) is RoutedLinear
    rows = torch.randn(3, 4, dtype=torch.bfloat16)
    layer = model[1].to(torch.bfloat16)
    assert torch.equal(layer(rows), nn.functional.linear(rows, layer.weight, layer.bias))


def test_a_routed_model_copies_and_saves_as_before():
    model = nn.Sequential(nn.Linear(4, 4))
    route_linears(model)
    copied = copy.deepcopy(model)
    copied[0].weight.data.zero_()
    assert not torch.equal(model[0].weight, copied[0].weight)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
