"""An opened run: inputs checked, run folder locked, group built, state restored, journal open.

Takes a loaded configuration; gives a ``Session`` that ``run.py`` steps through. The order is the point: whatever is
cheap to check is checked before the run folder is touched, and that before a model is loaded.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trainfer.config.load import LoadedConfig, effective_yaml
from trainfer.errors import CheckpointError
from trainfer.integrations.transformers.generation import stop_token_ids
from trainfer.plan.run_document import run_document
from trainfer.train.data.order import steps_to_run
from trainfer.train.journal.checkpoints import CheckpointStore, why_damaged
from trainfer.train.journal.folder import RunFolder
from trainfer.train.journal.loggers import Loggers, RunNames, open_loggers
from trainfer.train.journal.metrics import MetricsLog
from trainfer.train.journal.rollouts import RolloutRecord, remove_rollouts_after, write_rollouts
from trainfer.train.journal.starts import DATA_DIGEST, check_same_data, data_digest
from trainfer.train.update.kl_control import KlControl
from trainfer.types import SamplingParams
from trainfer.workers.build import build_group, find_model_folder
from trainfer.workers.consistency import Consistency, Switches, read_switches
from trainfer.workers.group import SyncProof, WorkerGroup
from trainfer.workers.inputs import Inputs, read_inputs
from trainfer.workers.saving import Saving, restore_kl_control
from trainfer.workers.settings import (
    Stages,
    kl_control_of,
    stages,
    training_sampling,
    validation_sampling,
)
from trainfer.workers.violation import Exactness

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """Where a run is written down."""

    folder: RunFolder
    metrics: MetricsLog
    loggers: Loggers
    checkpoints: CheckpointStore

    def write(
        self,
        step: int,
        metrics: Mapping[str, float],
        records: Sequence[RolloutRecord],
        validation: Sequence[RolloutRecord] | None,
    ) -> None:
        """One step: its rollouts, then its line of metrics, then other people's loggers."""
        write_rollouts(self.folder.rollouts, step, records)
        if validation is not None:
            write_rollouts(self.folder.rollouts, step, validation, validation=True)
        self.metrics.append(step, metrics)
        self.loggers.log(step, metrics)

    def write_validation(
        self, step: int, metrics: Mapping[str, float], records: Sequence[RolloutRecord]
    ) -> None:
        """A validation that belongs to no training step: its responses, and other people's loggers."""
        write_rollouts(self.folder.rollouts, step, records, validation=True)
        self.loggers.log(step, metrics)

    def close(self) -> None:
        """Write what waits and give the folder free."""
        self.loggers.close()
        self.metrics.close()
        self.folder.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """What a step needs."""

    inputs: Inputs
    group: WorkerGroup
    journal: Journal
    steps: range
    """Steps that are left, from 1."""
    stages: Stages
    training_sampling: SamplingParams
    validation_sampling: SamplingParams
    consistency: Consistency
    exactness: Exactness
    kl_control: KlControl
    saving: Saving

    @property
    def num_ranks(self) -> int:
        """That train together."""
        return self.inputs.plan.num_ranks

    @property
    def total(self) -> int:
        """The step at which the run ends."""
        return self.steps.stop - 1

    @property
    def validates_before(self) -> bool:
        """True at the very start of a run with validation; a resumed run has done it, unless it is to do nothing else."""
        trainer = self.inputs.config.trainer
        is_due = self.steps.start == 1 or trainer.val_only
        return self.inputs.validation is not None and trainer.val_before_train and is_due

    def validates_after(self, step: int) -> bool:
        """True every ``trainer.test_freq`` steps and after the last; never where that is not positive (as verl)."""
        return self.inputs.validation is not None and self._is_due(step, self.inputs.config.trainer.test_freq)

    def saves_after(self, step: int) -> bool:
        """True every ``trainer.save_freq`` steps and after the last; never where that is not positive (as verl)."""
        return self._is_due(step, self.inputs.config.trainer.save_freq)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step == self.total or step % every == 0)

    def close(self, *, in_order: bool = True) -> None:
        """End comparisons and workers, close the journal; ``in_order`` False after a failure."""
        self.consistency.comparisons.close()
        self.saving.close(in_order=in_order)
        self.group.close()
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(in_order=kind is None or kind is GeneratorExit)


def open_session(
    loaded: LoadedConfig,
    *,
    make_group: Callable[[Inputs, Path], WorkerGroup] = build_group,
    on_warmup: Callable[[int, float], None] | None = None,
) -> Session:
    """Check, open, build, restore.

    Args:
        loaded: The configuration.
        make_group: Builds the workers from inputs and model folder.
        on_warmup: Called after each step of the warm-up that makes the demonstration's model, if there is one.

    Raises:
        TrainferError: of the kind of whatever is wrong.
    """
    switches = read_switches(os.environ)
    inputs = read_inputs(loaded)
    config = inputs.config
    assert config.trainer.default_local_dir is not None, "the schema fills it in"
    folder = RunFolder.open(
        Path(config.trainer.default_local_dir),
        config_text=effective_yaml(loaded),
        plan_json=run_document(loaded.settings, inputs.plan),
        resume_mode=config.trainer.resume_mode,
    )
    try:
        return _open_in(folder, inputs, switches, make_group, on_warmup)
    except BaseException:
        folder.close()
        raise


def _open_in(
    folder: RunFolder,
    inputs: Inputs,
    switches: Switches,
    make_group: Callable[[Inputs, Path], WorkerGroup],
    on_warmup: Callable[[int, float], None] | None,
) -> Session:
    config = inputs.config
    checkpoints = CheckpointStore(folder.checkpoints, keep=config.trainer.max_actor_ckpt_to_keep)
    checkpoints.remove_leftovers()
    steps_done, checkpoint = _find_start(inputs, checkpoints)
    digest = data_digest(inputs.training.prompts)
    if steps_done:
        check_same_data(folder.starts, digest, files=config.data.train_paths())
    kl_control = kl_control_of(config)
    steps = steps_to_run(
        inputs.order.num_rows,
        inputs.order.prompts_per_step,
        total_epochs=config.trainer.total_epochs,
        total_training_steps=config.trainer.total_training_steps,
        steps_done=steps_done,
    )
    model_folder = find_model_folder(inputs, folder.path, on_warmup=on_warmup)
    group = make_group(inputs, model_folder)
    try:
        if checkpoint is not None:
            group.load_checkpoint(checkpoint)
            restore_kl_control(kl_control, checkpoint)
            logger.info("Resumed from %s: step %d is next.", checkpoint, steps.start)
        proof = group.sync_weights()
        journal = _open_journal(folder, checkpoints, inputs, steps_done, proof, digest)
    except BaseException:
        group.close()
        raise
    stop_ids = stop_token_ids(model_folder, inputs.tokenizer)
    consistency = Consistency(
        config.trainfer.consistency,
        switches,
        run_folder=folder.path,
        first_step=steps.start,
        plan=inputs.plan,
        model_folder=model_folder,
        run_config=inputs.loaded.settings.nested(),
    )
    return Session(
        inputs=inputs,
        group=group,
        journal=journal,
        steps=steps,
        stages=stages(config, inputs.plan),
        training_sampling=training_sampling(config, stop_token_ids=stop_ids),
        validation_sampling=validation_sampling(config, stop_token_ids=stop_ids),
        consistency=consistency,
        exactness=Exactness(config, consistency, num_ranks=inputs.plan.num_ranks),
        kl_control=kl_control,
        saving=_saving(inputs, journal, group, kl_control),
    )


def _saving(inputs: Inputs, journal: Journal, group: WorkerGroup, kl_control: KlControl) -> Saving:
    behind = inputs.config.actor_rollout_ref.actor.checkpoint.async_save
    return Saving(journal.checkpoints, journal.metrics, group, kl_control, in_background=behind)


def _find_start(inputs: Inputs, checkpoints: CheckpointStore) -> tuple[int, Path | None]:
    """Steps done and the checkpoint that holds them.

    Raises:
        CheckpointError: ``trainer.resume_from_path`` is missing or damaged.
    """
    trainer = inputs.config.trainer
    if trainer.resume_mode == "disable":
        return 0, None
    if trainer.resume_mode == "auto":
        found = checkpoints.newest()
        return (found.step, found.folder) if found else (0, None)
    if trainer.resume_from_path is None:
        raise CheckpointError(
            "trainer.resume_mode=resume_path needs trainer.resume_from_path, a folder global_step_N."
        )
    folder = Path(trainer.resume_from_path)
    number = folder.name.removeprefix("global_step_")
    if number == folder.name or not number.isdecimal():
        raise CheckpointError(
            f"trainer.resume_from_path={folder} is not named global_step_N, so its step is unknown."
        )
    reason = why_damaged(folder)
    if reason is not None:
        raise CheckpointError(
            f"trainer.resume_from_path={folder} cannot be used: {reason}. Name a whole checkpoint."
        )
    return int(number), folder


def _open_journal(
    folder: RunFolder,
    checkpoints: CheckpointStore,
    inputs: Inputs,
    steps_done: int,
    proof: SyncProof,
    digest: str,
) -> Journal:
    trainer = inputs.config.trainer
    if trainer.resume_mode == "resume_path":
        # Later checkpoints have no metrics any more, so a later `auto` must not find them.
        checkpoints.set_aside_after(steps_done)
    remove_rollouts_after(folder.rollouts, steps_done)
    metrics = MetricsLog(folder.metrics, resumed_step=steps_done)
    folder.record_start(
        resumed_step=steps_done,
        details={
            DATA_DIGEST: digest,
            "weights_version": proof.weights_version,
            "device": str(inputs.device),
            "old_logprobs": stages(inputs.config, inputs.plan).old_logprobs.value,
        },
    )
    names = RunNames(
        project=trainer.project_name,
        experiment=trainer.experiment_name,
        folder=folder.path,
        resumed_step=steps_done,
        config=inputs.loaded.settings.nested(),
    )
    return Journal(
        folder=folder,
        metrics=metrics,
        loggers=open_loggers(trainer.logger, names),
        checkpoints=checkpoints,
    )
