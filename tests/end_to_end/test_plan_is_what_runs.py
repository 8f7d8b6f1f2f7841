"""The plan's numbers are counted in real runs of one rank: forwards, backwards, optimizer steps."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
import torch

from trainfer.config.load import load_config
from trainfer.errors import PlanError
from trainfer.plan.analyse import analyse
from trainfer.plan.read import question_of_settings
from trainfer.plan.records import Span
from trainfer.plan.step import plan_step
from trainfer.run import run_steps
from trainfer.workers.session import open_session

A = "actor_rollout_ref"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "train.parquet"
    table = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index},
        }
        for index, word in enumerate(["ab", "abc", "ca", "dcba", "bc", "cb", "ad", "da"])
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
    return path


def configured(rows, run, **sizes):
    names = {
        "T": "data.train_batch_size", "n": f"{A}.rollout.n", "M": f"{A}.actor.ppo_mini_batch_size",
        "m": f"{A}.actor.ppo_micro_batch_size_per_gpu", "tokens": f"{A}.actor.ppo_max_token_len_per_gpu",
        "L": f"{A}.rollout.log_prob_micro_batch_size_per_gpu", "Lref": f"{A}.ref.log_prob_micro_batch_size_per_gpu",
        "E": f"{A}.actor.ppo_epochs", "kl": f"{A}.actor.use_kl_loss",
    }  # fmt: skip
    base = [
        f"data.train_files={rows}", "data.max_prompt_length=16", "data.max_response_length=6", "trainer.device=cpu",
        f"{A}.model.enable_gradient_checkpointing=false", f"{A}.actor.fsdp_config.dtype=fp32", f"{A}.rollout.dtype=fp32",
        "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainfer.warmup.steps=0",
        f"trainer.default_local_dir={run}", "trainfer.warmup.hidden_size=16", "trainfer.warmup.intermediate_size=16",
        "trainfer.warmup.num_layers=1",
    ]  # fmt: skip
    return load_config(
        None, [*base, *(f"{names[name]}={str(value).lower()}" for name, value in sizes.items())]
    )


def counted(loaded, monkeypatch):
    """Calls of one step by stage: whole-model forwards, backwards, optimizer steps, sequences."""
    counts: Counter[str] = Counter()
    stage = ["build"]

    def staged(group, name):
        method = getattr(group, name)

        def call(sequences, *rest, **named):
            stage[0] = name
            counts[f"{name} sequences"] += len(sequences)
            try:
                return method(sequences, *rest, **named)
            finally:
                stage[0] = "other"

        monkeypatch.setattr(group, name, call)

    def on_forward(module, _arguments):
        if type(module).__name__.endswith("ForCausalLM"):
            counts[f"{stage[0]} forwards"] += 1

    backward, step = torch.Tensor.backward, torch.optim.AdamW.step

    def on_backward(*arguments, **named):
        counts[f"{stage[0]} backwards"] += 1
        return backward(*arguments, **named)

    def on_step(*arguments, **named):
        counts[f"{stage[0]} optimizer steps"] += 1
        return step(*arguments, **named)

    monkeypatch.setattr(torch.Tensor, "backward", on_backward)
    monkeypatch.setattr(torch.optim.AdamW, "step", on_step)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(on_forward)
    try:
        with open_session(loaded) as session:
            for name in ("old_logprobs", "ref_logprobs", "update"):
                staged(session.group, name)
            assert len(list(run_steps(session))) == 1
    finally:
        hook.remove()
    return counts


def within(number, planned):
    return planned.min <= number <= planned.max if isinstance(planned, Span) else number == planned


@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 4, "n": 3, "M": 4, "m": 4, "L": 5, "kl": True, "Lref": 3},
        {"T": 4, "n": 2, "M": 2, "m": 3, "L": 8, "E": 2},
        {"T": 6, "n": 2, "M": 3, "tokens": 64, "kl": True},
        {"T": 2, "n": 5, "M": 1, "m": 5, "L": 1},
    ],
    ids=["one mini-batch", "epochs and a ragged micro-batch", "by tokens", "two mini-batches"],
)
def test_what_the_plan_says_is_what_runs(rows, tmp_path, monkeypatch, sizes):
    loaded = configured(rows, tmp_path / "run", **sizes)
    plan = plan_step(loaded.config)
    numbers = analyse(question_of_settings(loaded.settings, variables={}), "trainfer").derived
    counts = counted(loaded, monkeypatch)
    assert counts["update sequences"] == plan.sequences_per_step == numbers.sequences_per_step
    own_pass = numbers.log_prob_forwards_per_rank != 0
    assert own_pass is (plan.optimizer_steps_per_step > 1)
    assert counts["old_logprobs sequences"] == (plan.sequences_per_step if own_pass else 0)
    assert (
        counts["update optimizer steps"] == plan.optimizer_steps_per_step == numbers.optimizer_steps_per_step
    )
    assert counts["update forwards"] == counts["update backwards"]
    a_step = counts["update backwards"] / plan.optimizer_steps_per_step
    assert within(a_step, numbers.gradient_accumulation_steps)
    assert within(counts["old_logprobs forwards"], numbers.log_prob_forwards_per_rank)
    assert within(counts["ref_logprobs forwards"], numbers.ref_log_prob_forwards_per_rank)


def test_what_the_plan_refuses_does_not_start(rows, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(PlanError, match="not whole mini-batches"):
        open_session(configured(rows, run, T=4, n=2, M=3, m=2))
    assert not run.exists()


def test_the_run_folder_holds_the_plan_document(rows, tmp_path):
    run = tmp_path / "run"
    with open_session(configured(rows, run, T=4, n=2, M=4, m=4)):
        document = json.loads((run / "plan.json").read_text())
    assert (document["schema"], document["rules"], document["ok"]) == ("trainfer.plan/1", "trainfer", True)
    assert document["derived"]["sequences_per_step"] == document["step"]["sequences_per_step"] == 8
    assert document["values"]["data.train_batch_size"] == {"value": 4, "source": "override"}
