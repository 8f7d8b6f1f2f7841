"""A prompt that runs through the model in chunks has the bits of a prompt that runs in one forward."""

import random
from pathlib import Path

import pytest
import torch
from engine_cases import ARCHITECTURES, assert_same, peaked_model
from transformers import AutoModelForCausalLM, MistralConfig

import trainfer
from trainfer.check.dump.reader import Dump, is_row
from trainfer.engines.builtin.chunks import Prefix, chunk_tokens, prefill_chunks
from trainfer.engines.builtin.kv_cache import PagedCache
from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine
from trainfer.exact.attention import ATTENTION_NAME
from trainfer.exact.packed import forward_logits, pack
from trainfer.types import GenerationRequest, SamplingParams

LENGTHS = (900, 65, 64, 63, 530, 17, 3, 193)


def requests_of(lengths: tuple[int, ...], *, per_prompt: int = 1, new: int = 6) -> list[GenerationRequest]:
    numbers = random.Random(3)
    prompts = [tuple(numbers.randrange(5, 261) for _ in range(length)) for length in lengths]
    return [
        GenerationRequest(
            request_id=f"{p}.{g}",
            prompt_ids=ids,
            seed=100 * p + g,
            sampling=SamplingParams(max_new_tokens=new),
        )
        for p, ids in enumerate(prompts)
        for g in range(per_prompt)
    ]


def generate(model, requests, **limits):
    return make_engine("builtin", model=model, limits=EngineLimits(**limits)).generate(requests)


@pytest.mark.parametrize("chunk", [16, 64, 208])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_completions_are_those_of_one_forward(architecture, chunk, bitwise):
    model = peaked_model(architecture)
    requests = requests_of(LENGTHS)
    whole = generate(model, requests)
    assert_same(generate(model, requests, max_num_batched_tokens=chunk), whole, bitwise=bitwise)


def with_a_window():
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=261, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        sliding_window=70,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


@pytest.mark.parametrize(
    "model",
    [peaked_model("qwen3").bfloat16(), with_a_window()],
    ids=["bfloat16", "sliding window"],
)
def test_half_precision_and_a_sliding_window(model, bitwise):
    requests = requests_of((400, 230))
    whole, parts = generate(model, requests), generate(model, requests, max_num_batched_tokens=96)
    assert parts == whole or not bitwise


def test_what_was_sampled_is_what_training_scores(bitwise):
    model = peaked_model("qwen2")
    requests = requests_of((700, 300), per_prompt=2, new=9)
    completions = generate(model, requests, max_num_batched_tokens=128)
    sequences = [r.prompt_ids + c.token_ids for r, c in zip(requests, completions, strict=True)]
    batch = pack(sequences, [len(r.prompt_ids) for r in requests], device="cpu")
    with torch.no_grad():
        scored = torch.log_softmax(forward_logits(model, batch), -1)
    trained = scored.gather(1, batch.targets_S[:, None])[:, 0]
    sampled = torch.tensor([value for completion in completions for value in completion.logprobs])
    assert torch.equal(sampled, trained) or not bitwise
    assert (sampled - trained).abs().max() <= 2e-5


def test_no_forward_is_longer_than_the_limit():
    model = peaked_model("qwen3")
    rows: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda _m, args, _o: rows.append(args[0].numel()))
    generate(model, requests_of((500, 90, 40, 300)), max_num_batched_tokens=100)
    hook.remove()
    assert max(rows) <= 104  # 100, in whole multiples of 8 rows
    assert sum(rows) >= 930


def test_groups_preemption_and_recomputation_in_chunks(bitwise):
    model = peaked_model("llama")
    requests = requests_of((120, 90, 100), per_prompt=3, new=40)
    whole = generate(model, requests)
    parts = generate(model, requests, max_num_batched_tokens=48, cache_tokens=400)
    assert_same(parts, whole, bitwise=bitwise)


def test_a_probe_tells_the_rows_of_chunks(tmp_path: Path):
    model = peaked_model("qwen3")
    requests = requests_of((150,), new=3)
    keys = []
    for name, limit in (("whole", 8192), ("parts", 64)):
        folder = tmp_path / name
        with trainfer.capture(model, folder, side="rollout", task="statistics"):
            generate(model, requests, max_num_batched_tokens=limit)
        dump = Dump(folder)
        tables = [dump.rows(0, record) for record in dump.row_tables(0).values()]
        keys.append({row["digest"].tobytes() for table in tables for row in table[is_row(table)]})
    assert len(keys[0]) == 152
    assert keys[0] == keys[1]


def test_chunks_of_integers():
    assert [chunk_tokens(n) for n in (1, 16, 31, 100, 8192)] == [16, 16, 16, 96, 8192]
    cache = PagedCache(8, 16)
    chunks = list(prefill_chunks(list(range(100, 170)), cache, [1, 2, 3, 4, 5], 32))
    assert [(c.plan.first, c.plan.last) for c in chunks] == [(0, 32), (32, 64), (64, 70)]
    assert chunks[2].input_ids.tolist() == [[164, 165, 166, 167, 168, 169, 100, 100]]
    assert chunks[2].position_ids.tolist() == [[64, 65, 66, 67, 68, 69, 0, 1]]
    assert chunks[2].plan.cache_rows_T.tolist() == [80, 81, 82, 83, 84, 85, 0, 0]
    assert chunks[2].kept_rows.tolist() == [5] * 8
    named = chunks[1].plan.row_prefixes()
    assert all(row is not None and row[0] is named[0][0] for row in named)
    assert list(named[3][1]) == list(range(100, 136))
    assert (named[3][1][-1], named[3][1][-1:], len(named[3][1])) == (135, [135], 36)
    with pytest.raises(IndexError):
        Prefix([1, 2, 3], 2)[2]
