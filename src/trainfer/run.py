"""GRPO: one training step on one screen.

plan → generate → reward → old log-prob → ref log-prob → advantage → update → sync (+ proof) → report.

Takes an opened session; gives one ``StepReport`` a step, as a generator: a command line, a logger or a test
consumes the same. Everything is decided elsewhere: what is sampled and scored by ``train``, who computes by
``workers``, what can be checked before a model is loaded by ``workers.session``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainfer.config.load import LoadedConfig
from trainfer.train.agreement import agreement_metrics
from trainfer.train.journal.rollouts import RolloutRecord
from trainfer.train.metrics import Nobody, StageClock, Watcher, batch_metrics, timing_metrics
from trainfer.train.rollout.sample import collect, plan_rollout
from trainfer.types import SampledSequence
from trainfer.workers.first_validation import validate_before
from trainfer.workers.group import SyncProof
from trainfer.workers.session import Session, open_session
from trainfer.workers.settings import OldLogProbs
from trainfer.workers.shaping import shape
from trainfer.workers.validation import metrics_of, score_sequence, validate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step, done and written down."""

    step: int
    total: int
    """The step at which the run ends."""
    metrics: dict[str, float]
    """As in metrics.jsonl."""
    records: tuple[RolloutRecord, ...]
    """Sequences with score, advantage and the trainer's log-probs."""
    proof: SyncProof
    validation: tuple[RolloutRecord, ...] | None
    """After this step, where ``trainer.test_freq`` asked for it."""
    checkpoint: Path | None
    """The newest that has come to be whole in this step; with ``async_save`` it may be an earlier step's."""


def train(loaded: LoadedConfig, *, watcher: Watcher | None = None) -> Iterator[StepReport]:
    """Run every step that is left; see ``open_session`` for what is refused before the first."""
    with open_session(loaded) as session:
        yield from run_steps(session, watcher=watcher)


def run_steps(session: Session, *, watcher: Watcher | None = None) -> Iterator[StepReport]:
    """One report a step. The duration of a save is in the next step's line: its own was on disk before."""
    watcher = watcher or Nobody()
    extra = validate_before(session, watcher)
    if session.inputs.config.trainer.val_only:
        return
    for step in session.steps:
        clock = StageClock(watcher)
        with session.consistency.captured(session.group, step):
            records, proof, metrics = train_step(session, step, clock)
        validation = None
        if session.validates_after(step):
            with clock.stage("testing"):
                validation = validate(session.inputs, session.group, session.validation_sampling)
            metrics |= metrics_of(session.inputs, validation)
        tokens = sum(len(record.sequence.token_ids) for record in records)
        metrics |= extra | timing_metrics(clock.seconds(), total_tokens=tokens, num_ranks=session.num_ranks)
        session.journal.write(step, metrics, records, validation)
        checkpoint, extra = session.saving.poll(), {}
        if session.saves_after(step):
            saver, is_last = StageClock(watcher), step == session.total
            with saver.stage("save_checkpoint"):
                checkpoint = session.saving.save(step, required=is_last)
            extra = {"timing_s/save_checkpoint": saver.seconds()["save_checkpoint"]}
        yield StepReport(
            step=step,
            total=session.total,
            metrics=metrics,
            records=records,
            proof=proof,
            validation=validation,
            checkpoint=checkpoint,
        )
    session.consistency.finish()


def train_step(
    session: Session, step: int, clock: StageClock
) -> tuple[tuple[RolloutRecord, ...], SyncProof, dict[str, float]]:
    """The step itself: what was sampled and scored, the proof of the hand-over, the metrics."""
    inputs, group = session.inputs, session.group
    with clock.stage("gen"):
        sequences = sample(session, step, clock)
    with clock.stage("reward"):
        scores = [score_sequence(sequence) for sequence in sequences]
    old = ref = None
    if session.stages.old_logprobs is OldLogProbs.PASS:
        with clock.stage("old_log_prob"):
            old = group.old_logprobs(sequences)
    if session.stages.ref:
        with clock.stage("ref"):
            ref = group.ref_logprobs(sequences)
    with clock.stage("adv"):
        control = session.kl_control
        shaped = shape(inputs.config, session.stages, sequences, scores, old=old, ref=ref, kl_control=control)
    with clock.stage("update_actor"):
        update = group.update(shaped.training)
    with clock.stage("update_weights"):
        proof = group.sync_weights()
    ours = [None if scored is None else scored.sampled_logprobs for scored in old or update.scores]
    agreement = agreement_metrics(ours, [sequence.rollout_logprobs for sequence in sequences])
    session.exactness.check(group, step, sequences, ours, agreement)
    records = tuple(
        RolloutRecord(sequence=sequence, score=score, advantage=advantage, train_logprobs=logprobs)
        for sequence, score, advantage, logprobs in zip(
            sequences, scores, shaped.advantages, ours, strict=True
        )
    )
    metrics = {
        "training/global_step": float(step),
        "training/epoch": float(inputs.order.epoch(step)),
        **batch_metrics(sequences, scores=scores, rewards=shaped.rewards, training=shaped.training),
        **update.metrics,
        **shaped.metrics,
        **agreement,
        "weights/version": float(proof.weights_version),
        "weights/fingerprint_match": float(proof.matches),
    }
    return records, proof, metrics


def sample(session: Session, step: int, clock: StageClock) -> list[SampledSequence]:
    """This step's groups; which prompts and which seeds follows from the step's number alone."""
    inputs = session.inputs
    rollout = plan_rollout(
        [inputs.training.prompts[row] for row in inputs.order.take(step)],
        samples_per_prompt=inputs.plan.sequences_per_prompt,
        sampling=session.training_sampling,
        run_seed=inputs.config.trainfer.seed,
        step=step,
    )
    completions = session.group.generate(rollout.requests, on_tokens=clock.watcher.tokens)
    return collect(rollout, completions, inputs.decoder)
