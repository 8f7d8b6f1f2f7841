"""Fixtures of all unit tests."""

import pytest
import torch
import torch.nn.functional as F

from trainfer.exact.linear import linear


@pytest.fixture(scope="session")
def bitwise() -> bool:
    """True where this CPU's library sums a row in one order at all the shapes that exact.attention chooses."""
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in ((64, 64), (64, 192), (192, 64), (64, 261)):
        rows, weight = (
            torch.randn(512, inputs, generator=generator),
            torch.randn(outputs, inputs, generator=generator),
        )
        full = linear(rows, weight)
        if not all(torch.equal(linear(rows[:n], weight), full[:n]) for n in range(8, 200, 8)):
            return False
    query, key, value = (torch.randn(1, 4, 512, 16, generator=generator) for _ in range(3))
    full = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    for length in (*range(16, 193, 16), 384, 400, 496):
        part = F.scaled_dot_product_attention(
            query[:, :, :length], key[:, :, :length], value[:, :, :length], is_causal=True
        )
        if not torch.equal(part, full[:, :, :length]):
            return False
    return True
