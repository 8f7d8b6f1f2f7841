"""``trainfer eval CONFIG.yaml [OVERRIDES…]``: score the validation set with a checkpoint or the starting model.

Takes the configuration that a run was trained with; gives the mean score, in all and by data source. It samples
as the run's own validation does, with the same seeds, and writes nothing into the run folder.
"""

import json
import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import click

from trainfer.cli.export import find_checkpoint
from trainfer.cli.model_source import ModelSource, as_folder
from trainfer.config.load import load_config
from trainfer.errors import DataError
from trainfer.plan.step import plan_step
from trainfer.train.journal.checkpoints import list_checkpoints

if TYPE_CHECKING:
    from trainfer.train.journal.rollouts import RolloutRecord
    from trainfer.workers.inputs import Inputs

BASE, LATEST = "base", "latest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """Scores of some responses. Example: 3 of 4 right is ``Scored(count=4, mean=0.75)``."""

    count: int
    """Responses."""
    mean: float

    @classmethod
    def of(cls, scores: list[float]) -> "Scored":
        """Count and mean."""
        return cls(count=len(scores), mean=fmean(scores))


@click.command("eval")
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--checkpoint",
    metavar="base|latest|PATH",
    help="Which weights: those that training starts from, the newest checkpoint of the run folder, or a checkpoint. "
    "Default: latest where there is one, else base.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(config: Path, overrides: tuple[str, ...], *, checkpoint: str | None, as_json: bool) -> int:
    """Score the validation set of CONFIG (data.val_files): accuracy is the mean score."""
    loaded = load_config(config, overrides)
    plan_step(loaded.config)
    if not loaded.config.data.val_paths():
        raise DataError("there is nothing to score: set data.val_files to a Parquet or JSONL file.")
    assert loaded.config.trainer.default_local_dir is not None, "the schema fills it in"
    run_folder = Path(loaded.config.trainer.default_local_dir)
    source = _find_weights(checkpoint, run_folder)

    from trainfer.workers.inputs import read_inputs

    inputs = read_inputs(loaded)
    with tempfile.TemporaryDirectory(prefix="trainfer-") as scratch:
        folder = (
            _base_folder(inputs, run_folder, Path(scratch))
            if source is None
            else as_folder(source, Path(scratch))
        )
        records = evaluate(inputs, folder, adapted=source is None)
    _print(records, weights=BASE if source is None else source.describe(), as_json=as_json)
    return 0


def evaluate(inputs: "Inputs", model_folder: Path, *, adapted: bool = True) -> "tuple[RolloutRecord, ...]":
    """Sample and score every validation prompt with the model of a folder, which may have its adapter merged in already."""
    from trainfer.integrations.transformers.generation import stop_token_ids
    from trainfer.workers.build import DTYPES, build_engine
    from trainfer.workers.rollout import RolloutWorker
    from trainfer.workers.settings import validation_sampling
    from trainfer.workers.validation import validate

    dtype = DTYPES[inputs.config.actor_rollout_ref.rollout.dtype]
    rollout = RolloutWorker(build_engine(inputs, model_folder, dtype, adapted=adapted))
    stops = stop_token_ids(model_folder, inputs.tokenizer)
    try:
        return validate(inputs, rollout, validation_sampling(inputs.config, stop_token_ids=stops))
    finally:
        rollout.close()


def _find_weights(checkpoint: str | None, run_folder: Path) -> ModelSource | None:
    """None is the model that training starts from."""
    if checkpoint == BASE:
        return None
    if checkpoint is not None and checkpoint != LATEST:
        return ModelSource(checkpoint=find_checkpoint(Path(checkpoint)))
    if checkpoint is None and not list_checkpoints(run_folder / "checkpoints"):
        return None
    return ModelSource(checkpoint=find_checkpoint(run_folder))


def _base_folder(inputs: "Inputs", run_folder: Path, scratch: Path) -> Path:
    """The starting model; one that the warm-up makes is copied from the run folder, or made aside.

    A copy, because a model that was made for other settings is made again in its place: the run's must stay.
    """
    from trainfer.workers.build import find_model_folder
    from trainfer.workers.warmup import MODEL_FOLDER

    made = run_folder / MODEL_FOLDER
    if inputs.config.trainfer.warmup is not None and made.is_dir():
        shutil.copytree(made, scratch / MODEL_FOLDER)
    return find_model_folder(inputs, scratch)


def _print(records: "tuple[RolloutRecord, ...]", *, weights: str, as_json: bool) -> None:
    by_source: dict[str, list[float]] = defaultdict(list)
    for record in records:
        by_source[record.sequence.prompt.data_source].append(record.score)
    overall = Scored.of([record.score for record in records])
    sources = {name: Scored.of(scores) for name, scores in sorted(by_source.items())}
    if as_json:
        answer = {
            "schema": "trainfer.eval/1",
            "weights": weights,
            "accuracy": overall.mean,
            "responses": overall.count,
            "by_data_source": {
                name: {"accuracy": scored.mean, "responses": scored.count} for name, scored in sources.items()
            },
        }
        click.echo(json.dumps(answer, indent=1))
        return
    click.echo(f"{weights}: accuracy {overall.mean:.4f} over {overall.count} responses")
    if len(sources) > 1:
        for name, scored in sources.items():
            click.echo(f"  {name}: {scored.mean:.4f} over {scored.count}")
