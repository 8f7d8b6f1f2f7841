"""Loading prompts: what is read, what is refused and how it is told."""

import hashlib
import json
import re
from pathlib import Path

import jinja2
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainfer.errors import DataError, ModelError
from trainfer.integrations.transformers.tiny import byte_tokenizer
from trainfer.train.data.gsm8k import convert
from trainfer.train.data.gsm8k import main as convert_main
from trainfer.train.data.prompts import load_prompts, truncate

KNOWN = ("openai/gsm8k", "trainfer/letters")
# Case 31: the good row, and rows as people met them.
GOOD = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "Two pens cost 6. What does one cost?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0},
}
RAW = {"question": "Two pens cost 6. What does one cost?", "answer": "6/2=3\n#### 3"}


class CharacterTokenizer:
    """One token a character: ``U`` + content for each message, ``A`` as generation prompt."""

    def __init__(self, chat_template="a template"):
        self.chat_template = chat_template
        self.seen_kwargs = []

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize, return_dict, **kwargs):
        assert (add_generation_prompt, tokenize, return_dict) == (True, True, False)
        self.seen_kwargs.append(kwargs)
        if conversation[0]["role"] == "system":
            raise jinja2.TemplateError("System role not supported")
        text = "".join(f"U{message['content']}" for message in conversation) + "A"
        return [ord(character) for character in text]


def row(**changes):
    return {**GOOD, **changes}


def prompt_of(length):
    """A row whose prompt has ``length`` tokens, template included."""
    return row(prompt=[{"role": "user", "content": "x" * (length - 2)}])


def write(folder: Path, rows, name="data.parquet") -> Path:
    path = folder / name
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def load(*files, **options):
    options = {"max_prompt_length": 100, "known_data_sources": KNOWN, **options}
    return load_prompts(files, CharacterTokenizer(), **options)


def refusal(*files, **options) -> str:
    with pytest.raises(DataError) as caught:
        load(*files, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["data.parquet", "data.jsonl", "data.json"])
def test_a_good_row_becomes_a_tokenised_prompt(tmp_path, name):
    table = load(write(tmp_path, [GOOD], name))
    (prompt,) = table.prompts
    assert "".join(map(chr, prompt.token_ids)) == "UTwo pens cost 6. What does one cost?A"
    assert (prompt.index, prompt.data_source, prompt.ground_truth, prompt.ability) == (
        0,
        "openai/gsm8k",
        "3",
        "math",
    )
    assert prompt.messages[0].role == "user"
    assert dict(prompt.extra_info) == {"split": "train", "index": 0}
    assert (table.rows_read, table.rows_filtered, table.rows_truncated) == (1, 0, 0)


def test_optional_columns_may_be_absent_or_null(tmp_path):
    bare = {key: GOOD[key] for key in ("data_source", "prompt", "reward_model")}
    (prompt,) = load(write(tmp_path, [bare])).prompts
    assert (prompt.ability, dict(prompt.extra_info)) == ("", {})
    (prompt,) = load(write(tmp_path, [row(ability=None, extra_info=None)], "n.jsonl")).prompts
    assert (prompt.ability, dict(prompt.extra_info)) == ("", {})


def test_rows_of_several_files_are_numbered_through(tmp_path):
    first = write(tmp_path, [prompt_of(5), prompt_of(200), prompt_of(6)], "a.parquet")
    second = write(tmp_path, [prompt_of(7)], "b.jsonl")
    table = load(first, second, filter_overlong_prompts=True)
    assert [(p.index, len(p.token_ids)) for p in table.prompts] == [(0, 5), (2, 6), (3, 7)]
    assert table.summary() == "3 prompts of 4 rows (1 longer than allowed left out)"


def test_more_rows_than_a_batch_keep_their_order(tmp_path):
    rows = [row(reward_model={"style": "rule", "ground_truth": str(i)}) for i in range(1300)]
    table = load(write(tmp_path, rows))
    assert [p.ground_truth for p in table.prompts] == [str(i) for i in range(1300)]


@pytest.mark.parametrize(
    ("truncation", "kept"), [("left", "3456A"), ("right", "U1234"), ("middle", "U156A"), ("error", None)]
)
def test_truncation_cuts_where_it_says(tmp_path, truncation, kept):
    path = write(tmp_path, [row(prompt=[{"role": "user", "content": "123456"}]), prompt_of(5)])
    if kept is None:
        message = refusal(path, max_prompt_length=5, truncation=truncation)
        assert "row 0, column prompt: found 8 tokens, wanted at most data.max_prompt_length=5" in message
        assert "data.filter_overlong_prompts=true" in message
        return
    table = load(path, max_prompt_length=5, truncation=truncation)
    assert "".join(map(chr, table.prompts[0].token_ids)) == kept
    assert (len(table.prompts), table.rows_truncated) == (2, 1)
    assert "1 cut to the allowed length" in table.summary()


GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "verl_core.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", GOLDEN["truncation"], ids=lambda case: case["id"])
def test_truncation_keeps_what_verl_keeps(case):
    assert list(truncate(case["token_ids"], case["max_length"], case["truncation"])) == case["kept"]


def test_all_rows_too_long_is_an_error_not_an_empty_table(tmp_path):
    assert "all rows have more than 4 tokens" in refusal(
        write(tmp_path, [GOOD, GOOD]), max_prompt_length=4, filter_overlong_prompts=True
    )


def test_max_samples_takes_the_first_or_a_seeded_choice(tmp_path):
    path = write(tmp_path, [prompt_of(5 + i) for i in range(40)])
    assert [p.index for p in load(path, max_samples=3).prompts] == [0, 1, 2]
    assert len(load(path, max_samples=-1).prompts) == 40
    chosen = [p.index for p in load(path, max_samples=5, sample_seed=1).prompts]
    assert chosen == [p.index for p in load(path, max_samples=5, sample_seed=1).prompts]
    assert chosen != [p.index for p in load(path, max_samples=5, sample_seed=2).prompts]
    assert len(set(chosen)) == 5
    assert chosen == sorted(chosen)
    assert "not 0" in refusal(path, max_samples=0)


def test_other_column_names_can_be_chosen(tmp_path):
    renamed = {"chat": GOOD["prompt"], "task": "openai/gsm8k", "reward_model": GOOD["reward_model"]}
    (prompt,) = load(write(tmp_path, [renamed]), prompt_key="chat", reward_fn_key="task").prompts
    assert prompt.data_source == "openai/gsm8k"


def test_chat_template_arguments_arrive(tmp_path):
    tokenizer = CharacterTokenizer()
    load_prompts(
        [write(tmp_path, [GOOD])],
        tokenizer,
        max_prompt_length=99,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert tokenizer.seen_kwargs == [{"enable_thinking": False}]


def test_a_transformers_tokenizer_applies_its_template_with_the_generation_prompt(tmp_path):
    tokenizer = byte_tokenizer()
    (prompt,) = load_prompts([write(tmp_path, [GOOD])], tokenizer, max_prompt_length=99).prompts
    text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    assert text == f"<|user|>{GOOD['prompt'][0]['content']}<|end|><|assistant|>"
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="custom_chat_template"):
        load_prompts([write(tmp_path, [GOOD])], tokenizer, max_prompt_length=99)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(sorted(GOOD)), JSON, min_size=1))
def test_any_json_in_any_column_is_a_prompt_or_one_clear_error(tmp_path, changes):
    path = write(tmp_path, [row(**changes)], "fuzz.jsonl")
    message = ""
    try:
        table = load(path)
    except DataError as error:
        message = str(error)
    else:
        assert len(table.prompts) == 1
    assert not message or f"{path}, row 0, column " in message


def test_a_tokenizer_without_template_names_the_remedy(tmp_path):
    with pytest.raises(ModelError, match="custom_chat_template"):
        load_prompts([write(tmp_path, [GOOD])], CharacterTokenizer(chat_template=None), max_prompt_length=99)


def test_what_the_template_refuses_is_a_problem_of_its_row(tmp_path):
    bad = row(prompt=[{"role": "system", "content": "x"}])
    assert "row 1, column prompt: found messages that the chat template refuses (System role" in refusal(
        write(tmp_path, [GOOD, bad])
    )


@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl"])
@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ({"prompt": "Two pens cost 6."}, ["column prompt: found text 'Two pens cost 6.'", "list of chat messages", '[{"role": "user"']),
        ({"prompt": None}, ["column prompt: found null, wanted a list of chat messages"]),
        ({"data_source": ""}, ["column data_source: found text ''", "openai/gsm8k, trainfer/letters"]),
        ({"data_source": "./data/gsm8k"}, ["column data_source: found text './data/gsm8k'", "known data sources: openai/gsm8k, trainfer/letters"]),
        ({"reward_model": {"style": "rule"}}, ["column reward_model.ground_truth: found null, wanted text"]),
        ({"reward_model": {"style": "rule", "ground_truth": 3}}, ["column reward_model.ground_truth: found int 3", 'write numbers as text ("3")']),
        ({"reward_model": {"style": "rule", "ground_truth": ["3", "4"]}}, ["column reward_model.ground_truth: found a list of 2"]),
        ({"reward_model": {"style": "model", "ground_truth": "3"}}, ["column reward_model.style: found text 'model'"]),
        ({"reward_model": None}, ["column reward_model: found null"]),
        ({"prompt": [{"role": "user", "content": None}]}, ["column prompt[0].content: found null"]),
        ({"prompt": [{"role": None, "content": "x"}]}, ["column prompt[0].role: found null"]),
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": "y"}]}, ["the further keys tool_calls"]),
        ({"ability": 3}, ["column ability: found int 3, wanted text"]),
        ({"extra_info": "x"}, ["column extra_info: found text 'x', wanted an object"]),
    ],
)  # fmt: skip
def test_case_31_a_bad_row_is_told_with_file_row_column_found_and_wanted(tmp_path, name, bad, parts):
    path = write(tmp_path, [row(**bad)], name)
    message = refusal(path)
    for part in [f"{path}, row 0", *parts]:
        assert part in message


@pytest.mark.parametrize("name", ["raw.parquet", "raw.jsonl"])
def test_case_31_raw_gsm8k_is_recognised_and_the_offered_command_works(tmp_path, name, capsys):
    path = write(tmp_path, [RAW, {"question": "A thousand?", "answer": "#### 1,000"}], name)
    message = refusal(path)
    assert "column prompt" in message
    command = re.search(r"python -m trainfer\.train\.data\.gsm8k (\S+) (\S+)", message)
    assert command is not None
    assert convert_main(list(command.groups())) == 0
    assert "2 rows written" in capsys.readouterr().out
    table = load(Path(command[2]), max_prompt_length=200)
    assert [p.ground_truth for p in table.prompts] == ["3", "1000"]
    assert table.prompts[0].messages[0].content == (
        'Two pens cost 6. What does one cost? Let\'s think step by step and output the final answer after "####".'
    )
    assert convert_main(list(command.groups())) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_conversion_refuses_an_answer_without_number(tmp_path):
    path = write(tmp_path, [RAW, {"question": "q", "answer": "none"}])
    with pytest.raises(DataError, match="row 1, column answer"):
        convert(path, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_missing_columns_of_a_parquet_file_are_one_problem_each_not_one_a_row(tmp_path):
    path = write(tmp_path, [{"data_source": "openai/gsm8k", "text": "x"}] * 50)
    message = refusal(path)
    assert "2 problems" in message
    assert "column prompt: found no such column (there are data_source, text)" in message
    assert "column reward_model" in message


def test_problems_of_all_files_are_shown_ten_at_a_time_and_counted(tmp_path):
    bad = row(data_source="")
    first = write(tmp_path, [GOOD] + [bad] * 8, "a.parquet")
    second = write(tmp_path, [bad] * 25, "b.jsonl")
    message = refusal(first, second)
    assert "33 problems" in message
    assert message.count(", row ") == 10
    assert "and 23 more" in message
    assert message.count("known data sources") == 1


def test_nothing_is_tokenised_while_a_row_is_wrong(tmp_path):
    tokenizer = CharacterTokenizer()
    path = write(tmp_path, [GOOD, row(data_source="")])
    with pytest.raises(DataError):
        load_prompts([path], tokenizer, max_prompt_length=99, known_data_sources=KNOWN)
    assert tokenizer.seen_kwargs == []


def test_without_a_list_of_known_names_any_name_is_taken(tmp_path):
    path = write(tmp_path, [row(data_source="mine")])
    assert load(path, known_data_sources=None).prompts[0].data_source == "mine"


def test_missing_files_are_all_named(tmp_path):
    message = refusal(tmp_path / "a.parquet", tmp_path / "b.jsonl")
    assert f"{tmp_path / 'a.parquet'}: found nothing, wanted a file" in message
    assert f"{tmp_path / 'b.jsonl'}: found nothing" in message


def test_a_folder_is_told_with_a_file_inside_it(tmp_path):
    write(tmp_path, [GOOD], "train.parquet")
    message = refusal(tmp_path)
    assert "found a folder" in message
    assert f"{tmp_path / 'train.parquet'}" in message


def test_no_file_at_all_is_told():
    assert "no data file is named" in refusal()


def test_an_unknown_suffix_is_told(tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n")
    assert "found the suffix '.csv', wanted a name ending in .parquet or .jsonl" in refusal(
        tmp_path / "data.csv"
    )


def test_an_empty_parquet_file_is_told(tmp_path):
    path = tmp_path / "e.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD]).slice(0, 0), path)
    assert f"{path}: found no rows, wanted at least one row" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_jsonl_file_is_told(tmp_path, content):
    path = tmp_path / "e.jsonl"
    path.write_bytes(content)
    assert "found no rows" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"PAR1" + b"\0" * 100 + b"PAR1"])
def test_bytes_that_are_not_parquet_are_told(tmp_path, content):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    assert "found bytes that are not Parquet" in refusal(path)


def test_a_parquet_file_damaged_in_its_pages_is_told(tmp_path):
    texts = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(2000)]
    path = write(tmp_path, [row(prompt=[{"role": "user", "content": text}]) for text in texts])
    content = bytearray(path.read_bytes())
    content[200:20_000] = b"\xff" * 19_800
    path.write_bytes(bytes(content))
    assert "found damaged data" in refusal(path)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (b"{broken", "a line that is not JSON"),
        (b"[1, 2]", "JSON of type list"),
        (b'"text"', "JSON of type str"),
        (b'{"a": "\xff"}', "a line that is not JSON"),
        (b"[" * 100_000, "a line that is not JSON"),
    ],
)
def test_a_bad_line_is_told_with_its_number(tmp_path, line, part):
    path = tmp_path / "x.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    message = refusal(path)
    assert f"{path}, row 1" in message
    assert part in message


def test_a_line_too_long_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("trainfer.train.data.files.MAX_LINE_BYTES", 1000)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b" " * 5000 + b"\n")
    assert "a line of at most 1000 bytes" in refusal(path)
