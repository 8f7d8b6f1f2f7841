import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM as AutoModel
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
)

from trainfer.errors import ModelError
from trainfer.exact.attention import (
    ATTENTION_NAME,
    AttentionForm,
    attention,
    query_chunks,
    safe_key_length,
)
from trainfer.exact.logprobs import token_logprobs
from trainfer.exact.packed import forward_logits, pack, pack_prompts
from trainfer.integrations.transformers.load import tiny_model

ARCHITECTURES = ["qwen2", "qwen3", "llama", "gpt2"]


def make_sequences(lengths: list[int], vocab: int = 261, seed: int = 0) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(5, vocab) for _ in range(length)] for length in lengths]


def packed_logprobs(model: PreTrainedModel, sequences: list[list[int]], prompts: list[int]) -> Tensor:
    batch = pack(sequences, prompts, device="cpu")
    return token_logprobs(forward_logits(model, batch), batch.targets_S, torch.ones(batch.num_scored))


def stock_logprobs(model: PreTrainedModel, sequences: list[list[int]], prompts: list[int]) -> Tensor:
    """Right-padded batch through the stock model with its own attention."""
    width = max(map(len, sequences))
    ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    model.set_attn_implementation("sdpa")
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    model.set_attn_implementation(ATTENTION_NAME)
    parts = []
    for row, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        scored = logits[row, prompt - 1 : len(sequence) - 1]
        targets = torch.tensor(sequence[prompt:], dtype=torch.int64)
        parts.append(token_logprobs(scored, targets, torch.ones(len(targets))))
    return torch.cat(parts)


def gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    assert one.keys() == two.keys()
    gap = torch.cat([(one[name] - two[name]).flatten() for name in one]).norm()
    return (gap / torch.cat([tensor.flatten() for tensor in one.values()]).norm()).item()


def test_a_batch_is_laid_out_as_its_docstring_says():
    batch = pack([[5, 6, 7, 1], [4, 2]], [2, 1], device="cpu")
    assert batch.input_ids.tolist() == [[5, 6, 7, 1, 4, 2, 5, 5]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert batch.scored_rows.tolist() == [1, 2, 4, 4, 4, 4, 4, 4]
    assert batch.targets_S.tolist() == [7, 1, 2]
    assert (batch.sequence_lengths, batch.response_lengths) == ((4, 2), (2, 1))


def test_prompts_score_their_last_row():
    batch = pack_prompts([[5, 6, 7], [4]], device="cpu")
    assert batch.scored_rows.tolist()[:2] == [2, 3]
    assert batch.num_scored == 2


def test_a_sequence_without_response_scores_nothing():
    batch = pack([[5, 6], [7, 8]], [2, 2], device="cpu")
    assert forward_logits(tiny_model("qwen2"), batch).shape == (0, 261)


def test_query_chunks_cover_every_row_once_and_end_at_safe_lengths():
    for length in range(16, 1600, 16):
        chunks = query_chunks(length)
        assert [row for start, end, _ in chunks for row in range(start, end)] == list(range(length))
        assert all(end <= keys == safe_key_length(end) for _, end, keys in chunks)
    assert query_chunks(208) == [(0, 192, 192), (192, 208, 384)]


def test_safe_key_lengths_stay_safe_and_out_of_the_bad_region():
    for length in range(1, 2000):
        safe = safe_key_length(length)
        assert safe >= length
        assert safe % 16 == 0
        assert not 192 < safe % 512 < 384
        assert safe_key_length(safe) == safe


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_logprobs_are_those_of_stock_transformers(architecture):
    model = tiny_model(architecture)
    lengths = [3, 20, 40, 7, 40, 230, 530]
    sequences, prompts = make_sequences(lengths), [1, 4, 40, 2, 10, 100, 20]
    with torch.no_grad():
        ours = packed_logprobs(model, sequences, prompts)
        stock = stock_logprobs(model, sequences, prompts)
    torch.testing.assert_close(ours, stock, atol=5e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_is_each_sequence_alone_bit_for_bit(architecture, dtype, bitwise):
    model = tiny_model(architecture, dtype=dtype)
    lengths = [3, 20, 40, 7, 40, 230, 390]
    sequences, prompts = make_sequences(lengths), [1, 4, 39, 2, 10, 100, 20]
    with torch.no_grad():
        together = packed_logprobs(model, sequences, prompts)
        alone = [packed_logprobs(model, [s], [p]) for s, p in zip(sequences, prompts, strict=True)]
    assert torch.equal(together, torch.cat(alone)) or not bitwise


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=7),
    seed=st.integers(0, 1000),
)
def test_order_in_the_batch_changes_no_bit(bitwise, lengths, seed):
    model = tiny_model("qwen2", hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64)
    sequences = make_sequences(lengths, seed=seed)
    prompts = [random.Random(seed).randrange(1, length) for length in lengths]
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    with torch.no_grad():
        plain = packed_logprobs(model, sequences, prompts)
        mixed = packed_logprobs(model, [sequences[i] for i in order], [prompts[i] for i in order])
    counts = [length - prompt for length, prompt in zip(lengths, prompts, strict=True)]
    pieces = dict(zip(order, mixed.split([counts[i] for i in order]), strict=True))
    assert torch.equal(plain, torch.cat([pieces[i] for i in range(len(lengths))])) or not bitwise


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradient_is_that_of_padded_stock_and_of_the_sequences_one_by_one(architecture):
    model = tiny_model(architecture)
    sequences, prompts = make_sequences([3, 20, 40, 7, 210]), [1, 4, 10, 2, 100]
    ours = gradients(model, packed_logprobs(model, sequences, prompts).sum())
    stock = gradients(model, stock_logprobs(model, sequences, prompts).sum())
    singles = [
        gradients(model, packed_logprobs(model, [s], [p]).sum())
        for s, p in zip(sequences, prompts, strict=True)
    ]
    summed = {name: sum((single[name] for single in singles), torch.zeros(())) for name in ours}
    assert relative_difference(stock, ours) < 1e-5
    assert relative_difference(summed, ours) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activation_checkpointing_changes_no_bit(architecture, use_reentrant):
    model = tiny_model(architecture).train()
    sequences, prompts = make_sequences([20, 40, 7]), [4, 10, 2]
    others = make_sequences([30, 9], seed=1), [3, 3]
    plain = gradients(model, packed_logprobs(model, sequences, prompts).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    loss = packed_logprobs(model, sequences, prompts).sum()
    packed_logprobs(model, *others)  # another plan in between must not be the one that backward finds
    again = gradients(model, loss)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def small_config(kind: type, **more: object) -> object:
    return kind(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=256, pad_token_id=0, eos_token_id=1, bos_token_id=None, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        small_config(MistralConfig, sliding_window=9),
        small_config(Gemma2Config, sliding_window=9, query_pre_attn_scalar=8, attn_implementation="eager"),
        small_config(Gemma3TextConfig, sliding_window=9, query_pre_attn_scalar=8),
        small_config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    ],
    ids=["mistral, window", "gemma 2, window and soft-cap", "gemma 3, window", "mixtral"],
)
def test_windows_softcaps_and_experts_are_those_of_eager_transformers(config):
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # scores large enough for window and soft-cap to matter
    sequences, prompts = make_sequences([40, 13, 25, 205], vocab=100), [3, 4, 5, 60]
    ours = packed_logprobs(model, sequences, prompts)
    model.set_attn_implementation("eager")
    parts = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        scored = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, prompt - 1 : -1]
        parts.append(token_logprobs(scored, torch.tensor(sequence[prompt:]), torch.ones(len(scored))))
    torch.testing.assert_close(ours, torch.cat(parts), atol=2e-5, rtol=0)


def test_attention_dropout_is_honoured_in_training_only():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    sequences, prompts = make_sequences([20, 40]), [4, 10]
    with torch.no_grad():
        first, second = (packed_logprobs(model, sequences, prompts) for _ in range(2))
        model.train()
        torch.manual_seed(0)
        third, fourth = (packed_logprobs(model, sequences, prompts) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(third, fourth)


def test_a_call_without_plan_names_the_remedy():
    with pytest.raises(ModelError, match=r"without a plan.*forward_logits"):
        tiny_model("qwen2")(input_ids=torch.tensor([[5, 6]]))


def test_a_padded_batch_is_refused_not_cut():
    batch = pack([[5, 6], [7, 8]], [1, 1], device="cpu")
    with pytest.raises(ModelError, match="got a batch of 2"):
        tiny_model("qwen2")(
            input_ids=torch.tensor([[5, 6], [7, 8]]), use_cache=False, attention_plan=batch.plan
        )


@pytest.mark.parametrize(
    ("attribute", "keywords", "message"),
    [
        (False, {}, "is_causal is False"),
        (True, {"s_aux": torch.zeros(4)}, "s_aux"),
        (True, {"attention_mask": torch.ones(1, 1, 4, 4)}, "attention mask"),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(attribute, keywords, message):
    layer = torch.nn.Module()
    layer.is_causal, layer.layer_idx = attribute, 0
    rows = torch.zeros(1, 4, 8, 8)
    mask = keywords.pop("attention_mask", None)
    with pytest.raises(ModelError, match=message):
        attention(layer, rows, rows, rows, mask, **keywords)


def test_a_window_of_one_sees_itself_only():
    rows = torch.randn(1, 2, 16, 8, generator=torch.Generator().manual_seed(0))
    batch = pack([list(range(16))], [1], device="cpu")
    form = AttentionForm(layer=0, scale=1.0, window=1, softcap=None, dropout=0.0)
    rows_THK = rows[0].transpose(0, 1)
    torch.testing.assert_close(batch.plan.attend(rows_THK, rows_THK, rows_THK, form), rows_THK)
