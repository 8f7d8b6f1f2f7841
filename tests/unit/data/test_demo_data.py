"""The demonstration's files are what their script writes, and load as prompts that can be learnt."""

import importlib.util
from pathlib import Path

import pyarrow.parquet
import pytest

from trainfer.train.data.prompts import load_prompts
from trainfer.train.reward import score
from trainfer.train.reward.registry import known_data_sources

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("tiny_cpu_data", EXAMPLES / "tiny_cpu_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bytes:
    chat_template = "a template"

    def apply_chat_template(self, conversation, **options):
        return list(conversation[0]["content"].encode())


def prompts(name):
    table = load_prompts(
        [EXAMPLES / name], Bytes(), max_prompt_length=32, known_data_sources=known_data_sources()
    )
    return table.prompts


def test_the_script_reproduces_the_committed_files(script, tmp_path):
    script.main(tmp_path)
    for name in ("tiny_cpu_train.parquet", "tiny_cpu_val.parquet"):
        assert pyarrow.parquet.read_table(tmp_path / name).equals(pyarrow.parquet.read_table(EXAMPLES / name))


def test_training_and_held_out_words_differ():
    train, val = prompts("tiny_cpu_train.parquet"), prompts("tiny_cpu_val.parquet")
    assert (len(train), len(val)) == (512, 64)
    texts = {prompt.messages[0].content for prompt in train + val}
    assert len(texts) == 576


def test_exactly_one_of_the_six_demonstrations_is_rewarded():
    for prompt in prompts("tiny_cpu_train.parquet") + prompts("tiny_cpu_val.parquet"):
        shown = prompt.extra_info["demonstrations"]
        assert len(set(shown)) == 6
        assert sum(score(prompt.data_source, text, prompt.ground_truth) for text in shown) == 1.0
        assert prompt.messages[0].content == f"reverse {prompt.ground_truth[::-1]}"
