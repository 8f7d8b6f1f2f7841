"""The page "Attach anything": its Transformers block runs as it stands, and the pages that run the others exist."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from page_code import DOCS, code_under, statements


def test_the_transformers_block_gives_two_sides_that_agree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = code_under("attach-anything.md", "Transformers")
    assert len(statements(code)) <= 5
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    prompts = torch.tensor([[7, 8, 9, 10], [11, 12, 13, 14]])
    names = {"model": model, "prompts": prompts, "mask": torch.ones_like(prompts), "pad": 0}
    exec(compile(code, "attach-anything.md", "exec"), names)
    result = names["result"]
    assert result.verdict in ("equal", "rounding")
    coverage = result.comparison.coverage
    assert coverage.rows_matched == coverage.rows_rollout == 2 * (4 + 15)
    assert coverage.modules_unmatched == ()


@pytest.mark.parametrize("heading", ["Transformers", "vLLM", "TRL"])
def test_every_block_has_five_lines(heading):
    assert 1 <= len(statements(code_under("attach-anything.md", heading))) <= 5


def test_a_block_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="no Python block under '## SGLang'"):
        code_under("attach-anything.md", "SGLang")


def test_the_page_names_the_tests_that_run_it():
    tests = DOCS.parent / "tests"
    text = (DOCS / "attach-anything.md").read_text(encoding="utf-8")
    for path in ("unit/integrations/test_page_attach.py", "vllm/test_page_attach_vllm.py", "trl"):
        assert f"tests/{path}" in text
        assert (tests / path).exists()
