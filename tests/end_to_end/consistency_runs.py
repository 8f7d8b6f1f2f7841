"""Short runs of a random two-layer model whose steps are captured."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet

from trainfer.config.load import load_config
from trainfer.integrations.transformers.load import byte_tokenizer, save_model, tiny_model
from trainfer.train.journal.metrics import read_metrics
from trainfer.workers.build import build_local_group

WORDS = ("ab", "cd", "the quick brown fox", "x")


def make_world(folder: Path) -> Path:
    save_model(tiny_model("qwen3"), folder / "model", tokenizer=byte_tokenizer())
    rows = [
        {
            "data_source": "trainfer/letters",
            "prompt": [{"role": "user", "content": word}],
            "ability": "letters",
            "reward_model": {"style": "rule", "ground_truth": word[::-1]},
            "extra_info": {"index": index},
        }
        for index, word in enumerate(WORDS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")
    return folder


def configured(world: Path, run: Path, *overrides: str):
    return load_config(
        None,
        [
            f"data.train_files={world / 'train.parquet'}",
            "data.train_batch_size=4",
            "data.max_prompt_length=64",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={world / 'model'}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.fsdp_config.dtype=fp32",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.dtype=fp32",
            # log-probs of a random model's samples are never rewarded: the entropy moves the weights
            "actor_rollout_ref.actor.entropy_coeff=0.1",
            "trainer.total_training_steps=2",
            "trainer.total_epochs=100",
            "trainer.device=cpu",
            "trainfer.consistency.task=tensor",
            f"trainer.default_local_dir={run}",
            *overrides,
        ],
    )


def result(run: Path, step: int) -> dict:
    return json.loads((run / "consistency" / f"step_{step}" / "result.json").read_text())


def lines(run: Path) -> dict:
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
        for step, metrics in read_metrics(run / "metrics.jsonl")
    }


def group_with(change):
    """A builder of groups whose engine ``change`` has had in its hands."""

    def make_group(inputs, model_folder):
        group = build_local_group(inputs, model_folder)
        change(group._rollout.engine)
        return group

    return make_group
