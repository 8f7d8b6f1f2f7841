"""A prompt that several sequences share is computed once, and nobody can tell."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from trainfer.exact.layout import lay_out
from trainfer.exact.logprobs import token_logprobs
from trainfer.exact.packed import forward_logits, pack
from trainfer.integrations.transformers.load import tiny_model


def groups_of(
    prompts: list[int], responses: list[list[int]], seed: int = 0
) -> tuple[list[list[int]], list[int]]:
    """Sequences in shuffled order; group g has a prompt of ``prompts[g]`` tokens and one sequence per response."""
    numbers = random.Random(seed)
    made: list[tuple[list[int], int]] = []
    for length, members in zip(prompts, responses, strict=True):
        prompt = [numbers.randrange(5, 261) for _ in range(length)]
        made += [(prompt + [numbers.randrange(5, 261) for _ in range(count)], length) for count in members]
    numbers.shuffle(made)
    return [ids for ids, _ in made], [length for _, length in made]


def logits_and_gradients(
    model: PreTrainedModel, sequences: list[list[int]], prompts: list[int], *, share: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    batch = pack(sequences, prompts, device="cpu", share_prompts=share)
    logits = forward_logits(model, batch)
    weights = torch.linspace(-1, 1, batch.num_scored)
    model.zero_grad()
    (token_logprobs(logits, batch.targets_S, torch.ones(batch.num_scored)) * weights).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return logits.detach(), gradient, batch.input_ids.shape[1]


def test_rows_of_a_layout_are_those_of_its_docstring():
    layout = lay_out([[*range(16), 50, 51], [*range(16), 60, 61, 62]], [16, 16])
    assert layout.token_ids == (*range(16), 50, 51, 60, 61, 62)
    assert layout.positions == (*range(16), 16, 17, 16, 17, 18)
    assert [list(item.rows(range(14, item.length))) for item in layout.sequences] == [
        [14, 15, 16, 17],
        [14, 15, 18, 19, 20],
    ]
    assert [(stem.own_start, stem.length) for stem in layout.stems] == [(0, 16)]


def test_only_equal_prompts_of_some_length_are_shared():
    assert lay_out([[7] * 20, [7] * 21], [16, 16]).num_rows == 16 + 4 + 5
    assert lay_out([[7] * 20, [7] * 21], [15, 15]).num_rows == 41
    assert lay_out([[7] * 20, [7] * 21], [16, 17]).num_rows == 41
    assert lay_out([[7] * 20, [7] * 21], None).num_rows == 41


def test_the_rows_of_each_sequence_hold_its_tokens():
    sequences, prompts = groups_of([18, 30, 4], [[2, 3], [1, 1, 1], [5]])
    layout = lay_out(sequences, prompts)
    for ids, item in zip(sequences, layout.sequences, strict=True):
        rows = list(item.rows(range(item.length)))
        assert [layout.token_ids[row] for row in rows] == ids
        assert [layout.positions[row] for row in rows] == list(range(len(ids)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama", "gpt2"])
def test_sharing_changes_no_bit_of_a_logit(architecture, dtype, bitwise):
    model = tiny_model(architecture, dtype=dtype)
    sequences, prompts = groups_of([29, 190, 400, 5], [[64, 30, 7], [1, 2, 300], [20, 150], [9, 9]])
    with torch.no_grad():
        ours, apart = (
            forward_logits(model, pack(sequences, prompts, device="cpu", share_prompts=share))
            for share in (True, False)
        )
    torch.testing.assert_close(
        ours.float(), apart.float(), atol=5e-5 if dtype is torch.float32 else 0.1, rtol=0
    )
    assert torch.equal(ours, apart) or not bitwise


@settings(deadline=None, max_examples=20)
@given(
    prompts=st.lists(st.integers(1, 230), min_size=1, max_size=3),
    data=st.data(),
    seed=st.integers(0, 1000),
)
def test_sharing_moves_a_gradient_by_rounding_alone(bitwise, prompts, data, seed):
    responses = [data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4)) for _ in prompts]
    model = tiny_model("qwen3", hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64)
    sequences, lengths = groups_of(prompts, responses, seed)
    ours, our_gradient, rows = logits_and_gradients(model, sequences, lengths, share=True)
    apart, their_gradient, more_rows = logits_and_gradients(model, sequences, lengths, share=False)
    assert rows <= more_rows
    assert torch.equal(ours, apart) or not bitwise
    assert (our_gradient - their_gradient).norm() <= 1e-6 * their_gradient.norm()


def test_windowed_and_softcapped_layers_share_too():
    from transformers import AutoModelForCausalLM, Gemma2Config

    from trainfer.exact.attention import ATTENTION_NAME

    config = Gemma2Config(
        vocab_size=261, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    sequences, prompts = groups_of([29, 20], [[10, 20], [3, 4]])
    with torch.no_grad():
        ours, apart = (
            forward_logits(model, pack(sequences, prompts, device="cpu", share_prompts=share))
            for share in (True, False)
        )
    torch.testing.assert_close(ours, apart, atol=5e-6, rtol=0)
