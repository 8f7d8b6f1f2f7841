"""Which rows a step takes: a stateless order, so that resuming needs nothing but the step.

Takes the number of rows, the prompts per step, a seed and an epoch; gives row numbers. The permutation of
an epoch comes from the raw words of a Philox counter (Salmon et al., SC 2011), whose stream is fixed by
the algorithm, so it is the same on every machine and in every release of the libraries. Integers only.
"""

from dataclasses import dataclass

import numpy as np

from trainfer.errors import DataError, RunFolderError

_WORD = 2**64


def permutation(length: int, *, seed: int, epoch: int) -> list[int]:
    """Permutation of ``range(length)`` that ``seed`` and ``epoch`` alone decide.

    Ranks of ``length`` random 64-bit words; equal words (probability below length² / 2⁶⁵) keep their order.
    """
    key = np.array([seed % _WORD, epoch % _WORD], dtype=np.uint64)
    words = np.random.Philox(counter=0, key=key).random_raw(length)
    return np.argsort(words, kind="stable").tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptOrder:
    """The rows of every step.

    Example: 8 rows, 4 a step, no shuffle: steps 1 and 2 are epoch 0, ``take(2) == [4, 5, 6, 7]``, step 3
    begins epoch 1 with ``[0, 1, 2, 3]``.
    """

    num_rows: int
    prompts_per_step: int
    shuffle: bool
    seed: int = 0
    """Not read without ``shuffle``."""

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1 or self.steps_per_epoch < 1:
            raise DataError(
                f"data.train_batch_size={self.prompts_per_step} prompts a step, but the data holds {self.num_rows} "
                "usable prompts: not even one step. Lower data.train_batch_size or bring more rows (rows that were "
                "filtered as too long do not count)."
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole steps in one epoch."""
        return self.num_rows // self.prompts_per_step

    @property
    def rows_left_out_per_epoch(self) -> int:
        """Rows of each epoch that fill no whole step and are not trained on in it (verl's ``drop_last``)."""
        return self.num_rows % self.prompts_per_step

    def epoch(self, step: int) -> int:
        """Epoch, from 0, that a step (from 1) belongs to."""
        assert step >= 1, step
        return (step - 1) // self.steps_per_epoch

    def take(self, step: int) -> list[int]:
        """Row numbers of one step, counted from 1; the same whenever and wherever it is asked."""
        first = (step - 1) % self.steps_per_epoch * self.prompts_per_step
        return self.rows_of_epoch(self.epoch(step))[first : first + self.prompts_per_step]

    def rows_of_epoch(self, epoch: int) -> list[int]:
        """All rows in the order of one epoch, those left out at its end included."""
        if not self.shuffle:
            return list(range(self.num_rows))
        return permutation(self.num_rows, seed=self.seed, epoch=epoch)


def steps_total(
    num_rows: int, prompts_per_step: int, *, total_epochs: int, total_training_steps: int | None
) -> int:
    """Steps of the whole run: ``total_training_steps``, but never more than ``total_epochs`` hold (as verl).

    Raises:
        DataError: the rows do not fill a single step.
    """
    order = PromptOrder(num_rows=num_rows, prompts_per_step=prompts_per_step, shuffle=False)
    in_epochs = order.steps_per_epoch * total_epochs
    return in_epochs if total_training_steps is None else min(in_epochs, total_training_steps)


def steps_to_run(
    num_rows: int,
    prompts_per_step: int,
    *,
    total_epochs: int,
    total_training_steps: int | None,
    steps_done: int,
) -> range:
    """Steps that are left, counted from 1: ``range(steps_done + 1, total + 1)``.

    Raises:
        DataError: the rows do not fill a single step.
        RunFolderError: none is left; the message says which key ends the run.
    """
    total = steps_total(
        num_rows, prompts_per_step, total_epochs=total_epochs, total_training_steps=total_training_steps
    )
    if steps_done < total:
        return range(steps_done + 1, total + 1)
    by_epochs = (
        f"trainer.total_epochs={total_epochs} of {num_rows // prompts_per_step} steps each "
        f"({num_rows} prompts, {prompts_per_step} a step)"
    )
    epochs_decide = total_training_steps is None or total < total_training_steps
    key = by_epochs if epochs_decide else f"trainer.total_training_steps={total_training_steps}"
    raise RunFolderError(
        f"no step is left: {steps_done} steps are done and {key} allows {total}. Raise that value to go on, or "
        "name another trainer.default_local_dir to start anew."
    )
