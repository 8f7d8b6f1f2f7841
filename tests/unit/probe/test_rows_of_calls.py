"""Rows are known by their tokens: the same keys whatever the batch looked like."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny

import trainfer
from trainfer.check.dump.digest import prefix_digests
from trainfer.check.dump.reader import Dump, is_row
from trainfer.check.dump.records import RowLayout
from trainfer.check.dump.tensors import load_tensor, rows_first
from trainfer.errors import CaptureError
from trainfer.exact.packed import forward_logits, pack

SEQUENCES = [[7, 8, 9, 10, 11], [3, 4, 5], [7, 8, 9, 20]]


def keys(folder: Path) -> dict[tuple[int, int], int]:
    """Digest of every row and how often it came, over all calls' full tables."""
    dump = Dump(folder)
    tables = dump.row_tables(0)
    found: dict[tuple[int, int], int] = {}
    for call in dump.calls(0).values():
        rows = dump.rows(0, tables[call.table])
        for digest in rows[is_row(rows)]["digest"].tolist():
            found[tuple(digest)] = found.get(tuple(digest), 0) + 1
    return found


def layouts(folder: Path) -> set[RowLayout]:
    return {call.layout for call in Dump(folder).calls(0).values()}


def padded(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.long)
    for entry, tokens in enumerate(SEQUENCES):
        place = slice(6 - len(tokens), 6) if side == "left" else slice(0, len(tokens))
        ids[entry, place], mask[entry, place] = torch.tensor(tokens), 1
    return ids, mask


def packed() -> tuple[torch.Tensor, torch.Tensor]:
    ids = [token for tokens in SEQUENCES for token in tokens]
    positions = [place for tokens in SEQUENCES for place in range(len(tokens))]
    return torch.tensor([ids]), torch.tensor([positions])


@pytest.fixture
def model():
    return tiny("qwen2")


def test_left_right_packed_given_and_generated_rows_have_the_same_keys(model, tmp_path: Path):
    for side in ("left", "right"):
        ids, mask = padded(side)
        with trainfer.capture(model, tmp_path / side, side="train"):
            model(input_ids=ids, attention_mask=mask)
    ids, positions = packed()
    with trainfer.capture(model, tmp_path / "packed", side="train"):
        model(input_ids=ids, position_ids=positions)
    rows = trainfer.Rows(token_ids=ids[0].tolist(), sequence_lengths=[5, 3, 4])
    with trainfer.capture(model, tmp_path / "given", side="train", rows=rows):
        model(input_ids=ids)
    with trainfer.capture(model, tmp_path / "alone", side="train"):
        for tokens in SEQUENCES:
            model(torch.tensor([tokens]))
    expected = keys(tmp_path / "left")
    assert sum(expected.values()) == 12
    assert len(expected) == 9, "the first and the third sequence share three tokens"
    for other in ("right", "packed", "given", "alone"):
        assert keys(tmp_path / other) == expected, other
    assert layouts(tmp_path / "left") == layouts(tmp_path / "right") == {RowLayout.PADDED}
    assert layouts(tmp_path / "packed") == {RowLayout.PACKED}
    assert layouts(tmp_path / "given") == {RowLayout.GIVEN}


def test_generated_rows_have_the_keys_of_a_forward_over_the_whole_sequences(model, tmp_path: Path):
    ids, mask = padded("left")
    with trainfer.capture(model, tmp_path / "rollout", side="rollout"):
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=5, min_new_tokens=5, pad_token_id=0
        )
        model.generate(
            ids[:1],
            attention_mask=mask[:1],
            do_sample=False,
            max_new_tokens=3,
            min_new_tokens=3,
            pad_token_id=0,
        )
    full = [out[entry, 6 - len(tokens) : 10].tolist() for entry, tokens in enumerate(SEQUENCES)]
    with trainfer.capture(model, tmp_path / "train", side="train"):
        for tokens in full:
            model(torch.tensor([tokens]))
    assert keys(tmp_path / "train").keys() == keys(tmp_path / "rollout").keys()
    assert layouts(tmp_path / "rollout") == {RowLayout.PADDED, RowLayout.CACHED}


def test_values_stand_where_the_table_says(model, tmp_path: Path):
    ids, mask = padded("left")
    with trainfer.capture(model, tmp_path / "a", side="train"):
        model(input_ids=ids, attention_mask=mask)
    ids, positions = packed()
    with trainfer.capture(model, tmp_path / "b", side="train"):
        model(input_ids=ids, position_ids=positions)
    values = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        dump = Dump(folder)
        tables = dump.row_tables(0)
        record = next(
            t for t in dump.tensors(0) if t.module == "model.embed_tokens" and t.role.value == "output"
        )
        rows = rows_first(load_tensor(dump, 0, record), record.row_dims)
        table = dump.rows(0, tables[record.table])
        values.append(
            {
                tuple(slot["digest"].tolist()): rows[at]
                for at, slot in enumerate(table)
                if slot["position"] >= 0
            }
        )
    assert values[0].keys() == values[1].keys()
    for key, row in values[0].items():
        assert torch.equal(row, values[1][key])


def test_wrong_position_ids_of_a_padded_batch_are_no_key(model, tmp_path: Path):
    ids, mask = padded("left")
    with trainfer.capture(model, tmp_path / "a", side="train"):
        model(input_ids=ids, attention_mask=mask)
    with trainfer.capture(model, tmp_path / "b", side="train"):
        model(input_ids=ids, attention_mask=mask, position_ids=torch.full((3, 6), 4))
    assert keys(tmp_path / "a") == keys(tmp_path / "b")


def test_the_packed_forward_of_the_trainer_is_read_and_its_dummy_rows_have_no_key(tmp_path: Path):
    from trainfer.integrations.transformers.tiny import tiny_model

    model = tiny_model("qwen3")
    batch = pack(SEQUENCES, [2, 1, 2], device="cpu")
    with trainfer.capture(model, tmp_path / "d", side="train", pass_name="old_log_prob"):
        forward_logits(model, batch)
    dump = Dump(tmp_path / "d")
    call = dump.calls(0)[0]
    assert (call.layout, call.slots, call.counts.padding, call.pass_name) == (
        RowLayout.PACKED,
        16,
        4,
        "old_log_prob",
    )
    assert sum(keys(tmp_path / "d").values()) == 12
    logits = next(t for t in dump.tensors(0) if t.module == "lm_head" and t.role.value == "output")
    table = dump.rows(0, dump.row_tables(0)[logits.table])
    assert table["position"].tolist()[:8] == [1, 2, 3, 0, 1, 1, 2, 2]
    assert len(table) == logits.shape[1]


def test_a_prompt_that_the_trainer_computes_once_is_one_row_per_token(model, tmp_path: Path):
    from trainfer.integrations.transformers.tiny import tiny_model

    prompt = list(range(20, 40))
    sequences = [[*prompt, 7, 8], [*prompt, 9], [*prompt, 7, 10]]
    batch = pack(sequences, [20] * 3, device="cpu")
    with trainfer.capture(tiny_model("qwen2"), tmp_path / "shared", side="train") as cap:
        forward_logits(cap._model, batch)
    with trainfer.capture(model, tmp_path / "alone", side="train"):
        for tokens in sequences:
            model(torch.tensor([tokens]))
    assert keys(tmp_path / "shared").keys() == keys(tmp_path / "alone").keys()
    assert sum(keys(tmp_path / "shared").values()) == 20 + 2 + 1 + 2


def test_chunked_prefill_and_a_crop_go_on_from_the_cache(model, tmp_path: Path):
    from transformers import DynamicCache

    tokens = torch.tensor([[7, 8, 9, 10, 11, 12]])
    with trainfer.capture(model, tmp_path / "chunks", side="rollout"), torch.no_grad():
        cache = DynamicCache()
        model(tokens[:, :2], past_key_values=cache)
        model(tokens[:, 2:5], past_key_values=cache)
        model(torch.tensor([[55]]), past_key_values=cache)
        cache.crop(5)
        model(tokens[:, 5:], past_key_values=cache)
    with trainfer.capture(model, tmp_path / "whole", side="train"):
        model(tokens)
    dump = Dump(tmp_path / "chunks")
    extra = keys(tmp_path / "chunks").keys() - keys(tmp_path / "whole").keys()
    assert len(extra) == 1, "the token that was taken back"
    assert keys(tmp_path / "whole").keys() <= keys(tmp_path / "chunks").keys()
    assert [call.pass_name for call in dump.calls(0).values()] == ["prefill", "prefill", "decode", "decode"]
    assert dump.manifest.counts["discarded"] == 1


def test_a_cache_filled_before_the_capture_is_counted_and_gives_no_keys(model, tmp_path: Path):
    with torch.no_grad():
        cache = model(torch.tensor([[7, 8, 9]])).past_key_values
    with trainfer.capture(model, tmp_path / "d", side="rollout"), torch.no_grad():
        model(torch.tensor([[10, 11]]), past_key_values=cache)
    call = Dump(tmp_path / "d").calls(0)[0]
    assert (call.layout, call.counts.cached, call.counts.unknown) == (RowLayout.UNKNOWN, 3, 2)
    assert "not captured" in call.note


def test_tokens_after_the_end_token_are_counted_and_have_no_key(model, tmp_path: Path):
    from transformers import DynamicCache

    end = model.generation_config.eos_token_id
    with trainfer.capture(model, tmp_path / "d", side="rollout"), torch.no_grad():
        cache = DynamicCache()
        model(torch.tensor([[7, 8], [3, 4]]), past_key_values=cache)
        for column in ([end, 9], [0, 10], [0, 11]):
            model(torch.tensor(column)[:, None], past_key_values=cache)
    dump = Dump(tmp_path / "d")
    assert dump.manifest.counts["discarded"] == 2
    assert dump.manifest.counts["rows"] == 4 + 2 + 1 + 1


def test_requests_of_an_engine_are_followed_over_calls_by_rows(tmp_path: Path):
    model = tiny("llama")
    steps = [
        trainfer.Rows(
            token_ids=[7, 8, 9, 3, 0], requests=["a", "a", "a", "b", None], positions=[0, 1, 2, 0, -1]
        ),
        trainfer.Rows(token_ids=[10, 4], requests=["a", "b"], positions=[3, 1]),
        trainfer.Rows(token_ids=[5, 6], requests=["c", "d"], positions=[2, 9], prefixes={"c": [7, 8]}),
    ]
    source = iter(steps)
    with trainfer.capture(model, tmp_path / "a", side="rollout", rows=lambda: next(source)), torch.no_grad():
        for step in steps:
            model(torch.tensor([list(step.token_ids)]))
    with trainfer.capture(model, tmp_path / "b", side="train"):
        for tokens in ([7, 8, 9, 10], [3, 4], [7, 8, 5]):
            model(torch.tensor([tokens]))
    found = keys(tmp_path / "a")
    assert found.keys() <= keys(tmp_path / "b").keys()
    assert len(found) == 4 + 2 + 1
    counts = Dump(tmp_path / "a").manifest.counts
    assert (counts["unknown"], counts["padding"], counts["cached"]) == (1, 1, 2 + 9)
    passes = [call.pass_name for call in Dump(tmp_path / "a").calls(0).values()]
    assert passes == ["prefill", "decode", "decode"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": [1, 2]},
        {"token_ids": [1, 2], "sequence_lengths": [3]},
        {"token_ids": [1, 2], "sequence_lengths": [2, 0]},
        {"token_ids": [1, 2], "requests": ["a", "a"]},
        {"token_ids": [1, 2], "requests": ["a"], "positions": [0]},
        {"token_ids": [1], "requests": ["a"], "positions": [0], "sequence_lengths": [1]},
    ],
)
def test_rows_that_do_not_fit_are_refused(wrong: dict[str, object]):
    with pytest.raises(CaptureError, match="Rows"):
        trainfer.Rows(**wrong)  # type: ignore[arg-type]


def test_a_token_range_keeps_only_its_rows(model, tmp_path: Path):
    ids, mask = padded("left")
    with trainfer.capture(model, tmp_path / "d", side="train", token_range=(1, 3)):
        model(input_ids=ids, attention_mask=mask)
    dump = Dump(tmp_path / "d")
    record = next(t for t in dump.tensors(0) if t.module == "model.norm" and t.role.value == "output")
    assert record.shape == (6, 32)
    assert record.row_dims == (0,)
    table = dump.rows(0, dump.row_tables(0)[record.table])
    assert table["position"].tolist() == [1, 2, 1, 2, 1, 2]
    assert load_tensor(dump, 0, record).shape == (6, 32)


def test_prompts_only_leaves_out_decode_and_step_filters_steps(model, tmp_path: Path):
    with trainfer.capture(model, tmp_path / "p", side="rollout", prompts_only=True):
        model.generate(torch.tensor([[7, 8]]), do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert {t.pass_name for t in Dump(tmp_path / "p").tensors(0)} == {"prefill"}
    with trainfer.capture(model, tmp_path / "s", side="train", steps=[1]) as cap:
        for _ in range(3):
            model(torch.tensor([[7, 8]]))
            cap.step()
    assert {t.step for t in Dump(tmp_path / "s").tensors(0)} == {1}


def test_sketches_of_equal_rows_are_equal_in_any_batch(model, tmp_path: Path):
    ids, mask = padded("left")
    with trainfer.capture(model, tmp_path / "a", side="train", task="sketch"):
        model(input_ids=ids, attention_mask=mask)
    with trainfer.capture(model, tmp_path / "b", side="train", task="sketch"):
        model(torch.tensor([SEQUENCES[1]]))
    rows = []
    for name in ("a", "b"):
        dump = Dump(tmp_path / name)
        record = next(
            t for t in dump.tensors(0) if t.module == "model.embed_tokens" and t.role.value == "output"
        )
        table = dump.rows(0, dump.row_tables(0)[record.table])
        sketch = load_tensor(dump, 0, record)
        rows.append({tuple(slot["digest"].tolist()): sketch[at] for at, slot in enumerate(table)})
    for key, row in rows[1].items():
        assert torch.equal(row, rows[0][key])
    embedded = model.get_input_embeddings()(torch.tensor([SEQUENCES[1]]))[0]
    norms = np.array([row[-1].item() for row in rows[1].values()])
    assert np.allclose(norms, embedded.norm(dim=1).detach().numpy(), rtol=1e-6)


def test_an_attention_plan_that_tells_nothing_gives_no_keys(model, tmp_path: Path):
    class Silent:
        def attend(self) -> None:
            """Nothing."""

    class Taking(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, attention_plan: object) -> torch.Tensor:
            return self.inner(input_ids).logits

    with trainfer.capture(Taking(), tmp_path / "d", side="rollout") as cap:
        cap._model(torch.tensor([[3, 4]]), Silent())
    call = Dump(tmp_path / "d").calls(0)[0]
    assert call.layout is RowLayout.UNKNOWN
    assert "attention plan (Silent)" in call.note


def test_the_builtin_engine_and_the_packed_trainer_have_the_same_rows(tmp_path: Path):
    from trainfer.engines.builtin.engine import BuiltinEngine
    from trainfer.engines.limits import EngineLimits
    from trainfer.integrations.transformers.tiny import tiny_model
    from trainfer.types import GenerationRequest, SamplingParams

    model = tiny_model("qwen3")
    engine = BuiltinEngine(model, limits=EngineLimits(max_num_seqs=3))
    prompts = [(5, 6, 7), (5, 6, 7), (8, 9, 10, 11), tuple(range(20, 40))]
    requests = [
        GenerationRequest(
            request_id=str(at), prompt_ids=prompt, seed=at, sampling=SamplingParams(max_new_tokens=4 + at)
        )
        for at, prompt in enumerate(prompts)
    ]
    with trainfer.capture(model, tmp_path / "rollout", side="rollout"):
        answers = engine.generate(requests)
        engine.generate(requests[:1])
    sequences = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    with trainfer.capture(model, tmp_path / "train", side="train"), torch.no_grad():
        forward_logits(model, pack(sequences, [len(prompt) for prompt in prompts], device="cpu"))
    rollout, train = keys(tmp_path / "rollout").keys(), keys(tmp_path / "train").keys()
    last = {tuple(prefix_digests(np.array(tokens))[-1].tolist()) for tokens in sequences}
    assert rollout == train - last, "only the last sampled tokens were never executed"
    dump = Dump(tmp_path / "rollout")
    assert {call.pass_name for call in dump.calls(0).values()} == {"prefill", "decode"}
    assert dump.manifest.counts["unknown"] == 0
    assert dump.manifest.counts["padding"] > 0
