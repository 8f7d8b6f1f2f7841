import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainfer.exact.fingerprint import fingerprint, fingerprint_text, partial_fingerprint


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype == torch.int64:
        return torch.randint(-(1 << 62), 1 << 62, shape, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


ALL_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


def test_text_names_dtype_and_size_before_32_hex_digits():
    dtype, size, digits = fingerprint(torch.ones(3, 5, dtype=torch.bfloat16)).split(":")
    assert (dtype, size) == ("bfloat16", "15")
    assert len(digits) == 32
    int(digits, 16)


def test_sums_of_a_single_one_are_the_first_weights_worked_by_hand():
    # Bits 1 at index 0 leave table[0] * row_weight[0]; recomputed here in plain integers.
    def odd(mix: int, index: int) -> int:
        mask = (1 << 64) - 1
        value = ((index + 1) * 0x9E3779B97F4A7C15 + mix * 0xD1342543DE82EF95) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return (value ^ (value >> 31)) | 1

    expected = "".join(f"{odd(mix, 0) * odd(mix + 2, 0) % (1 << 64):016x}" for mix in (1, 2))
    assert fingerprint(torch.tensor([1], dtype=torch.int64)) == f"int64:1:{expected}"


@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_one_flipped_bit_anywhere_changes_both_halves(dtype):
    tensor = random_bits(dtype, (40_000,))
    before = fingerprint(tensor).split(":")[2]
    width = 8 * tensor.element_size()
    integers = tensor.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )
    for place in (0, 1, 16_383, 16_384, 39_999):
        bits = (0,) if dtype == torch.bool else (0, width // 2, width - 1)
        for bit in bits:
            flip = torch.tensor(1, dtype=integers.dtype) << bit
            integers[place] ^= flip
            after = fingerprint(tensor).split(":")[2]
            integers[place] ^= flip
            assert after[:16] != before[:16]
            assert after[16:] != before[16:]
    assert fingerprint(tensor).split(":")[2] == before


def test_swapped_elements_differ_within_and_across_blocks():
    tensor = random_bits(torch.float32, (70_000,))
    before = fingerprint(tensor)
    for first, second in ((0, 1), (5, 5 + (1 << 14)), (100, 69_999)):
        swapped = tensor.clone()
        swapped[first], swapped[second] = tensor[second].item(), tensor[first].item()
        assert fingerprint(swapped) != before


def test_negative_zero_is_not_zero():
    assert fingerprint(torch.tensor([-0.0])) != fingerprint(torch.tensor([0.0]))


def test_payloads_of_nan_are_told_apart():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(quiet).all()
    assert torch.isnan(other).all()
    assert fingerprint(quiet) != fingerprint(other)
    assert fingerprint(quiet) == fingerprint(quiet.clone())


def test_zeros_of_other_size_or_dtype_differ():
    texts = {fingerprint(torch.zeros(n, dtype=d)) for n in (0, 1, 8) for d in (torch.float32, torch.bfloat16)}
    assert len(texts) == 6


@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("shape", [(300, 257), (3, 200_000), (7, 5, 11)])
def test_layout_in_memory_does_not_matter(dtype, shape):
    tensor = random_bits(dtype, shape)
    turned = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    assert not turned.is_contiguous()
    assert fingerprint(turned) == fingerprint(tensor)
    strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
    assert fingerprint(strided) == fingerprint(tensor)
    assert fingerprint(strided.reshape(-1)) == fingerprint(tensor)


def test_a_long_strided_vector_is_its_copy():
    matrix = random_bits(torch.float32, (300_000, 2))
    assert fingerprint(matrix[:, 1]) == fingerprint(matrix[:, 1].contiguous())


def test_complex_and_float8_have_fingerprints():
    number = torch.complex(torch.randn(10), torch.randn(10))
    assert fingerprint(number) != fingerprint(number.conj())
    assert fingerprint(torch.ones(3).to(torch.float8_e4m3fn)) != fingerprint(
        torch.zeros(3).to(torch.float8_e4m3fn)
    )


@settings(deadline=None, max_examples=40)
@given(
    cuts=st.lists(st.integers(0, 150_000), max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
def test_shards_add_up_to_the_whole(cuts, dtype):
    tensor = random_bits(dtype, (150_000,))
    edges = [0, *sorted(cuts), 150_000]
    total = torch.zeros(2, dtype=torch.int64)
    for start, end in itertools.pairwise(edges):
        total += partial_fingerprint(tensor[start:end], start)
    assert fingerprint_text(dtype, tensor.numel(), total) == fingerprint(tensor)
