"""Compare two sides and say what it means: the check half's last step, strung together.

Takes two readable sides; gives a ``Diagnosis`` that can be looked at, printed and written. This is the only module of
the check half that knows comparison, explanation and report at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from trainfer.check.align.names import NameMap
from trainfer.check.compare.joined import join_sides
from trainfer.check.compare.records import Comparison, Verdict
from trainfer.check.compare.run import run_stages
from trainfer.check.compare.source import ReadableSide
from trainfer.check.explain.facts import side_facts
from trainfer.check.explain.records import Cause, Explanation, FirstDivergence
from trainfer.check.explain.tokens import Decode
from trainfer.check.explain.verdict import explain
from trainfer.check.replay.judged import judge_again
from trainfer.check.replay.records import Replay
from trainfer.check.replay.run import replay
from trainfer.check.replay.trials import find_causes
from trainfer.check.report.comparison import ReportNames, render_comparison
from trainfer.check.report.document import Document, document, encode
from trainfer.check.report.tables import rows_of, write_csv, write_xlsx
from trainfer.check.report.text import summary
from trainfer.errors import DumpError

EXIT_CODES = {Verdict.EQUAL: 0, Verdict.ROUNDING: 0, Verdict.DIVERGED: 1, Verdict.INCOMPARABLE: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The result of ``trainfer.compare``.

    Example: ``result.verdict`` is ``"diverged"``, ``result.first_divergence.module`` is ``"model.rotary_emb"``.
    """

    explanation: Explanation
    names: ReportNames
    replay: Replay | None = None
    """What every module introduced and inherited; None where no model was at hand."""

    @property
    def verdict(self) -> str:
        """``equal``, ``rounding``, ``diverged`` or ``incomparable``."""
        return self.explanation.verdict.value

    @property
    def first_divergence(self) -> FirstDivergence | None:
        """Stage, module, tokens and pass where the sides part first; None where they do not."""
        return self.explanation.first_divergence

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Why, the first cause first."""
        return self.explanation.causes

    @property
    def comparison(self) -> Comparison:
        """Everything that was measured."""
        return self.explanation.comparison

    @property
    def exit_code(self) -> int:
        """0 equal or rounding, 1 diverged, 2 incomparable."""
        return EXIT_CODES[self.explanation.verdict]

    def document(self) -> Document:
        """What ``result.json`` holds."""
        return document(self.explanation)

    def json(self) -> str:
        """``result.json`` as text."""
        return encode(self.document()).decode()

    def summary(self) -> str:
        """The terminal's view."""
        return summary(self.explanation)

    def write(self, folder: str | Path) -> Path:
        """Write ``result.json``, ``report.html``, ``modules.csv`` and ``modules.xlsx``; gives the folder.

        Raises:
            DumpError: the folder cannot be written.
        """
        path = Path(folder)
        rows = rows_of(self.explanation)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "result.json").write_bytes(encode(self.document()))
            (path / "report.html").write_text(
                render_comparison(self.explanation, self.names), encoding="utf-8"
            )
            write_csv(rows, path / "modules.csv")
            write_xlsx(rows, path / "modules.xlsx")
        except OSError as error:
            raise DumpError(
                f"{path} cannot be written: {error.strerror}; give another --out folder"
            ) from error
        return path


def diagnose(
    rollout: ReadableSide,
    train: ReadableSide,
    *,
    names: NameMap | None = None,
    decode: Decode | None = None,
    texts: Mapping[int, str] | None = None,
    model: nn.Module | None = None,
) -> Diagnosis:
    """Compare two sides.

    Args:
        rollout: The side that generated.
        train: The side that trains.
        names: Rules for modules' names; None takes trainfer's own.
        decode: Token ids -> text.
        texts: Text of each token id, for the report.
        model: The model that both sides are to have: its modules are run again in float64 on either side's captured
            inputs, and judged by what they introduce themselves.
    """
    joined = join_sides(rollout, train, names=names)
    replayed = None if model is None else replay(rollout, train, None, model, joined=joined)
    again = None if replayed is None else partial(judge_again, replay=replayed)
    comparison = run_stages(rollout, train, joined=joined, judge_again=again)
    if replayed is not None and model is not None:
        replayed = find_causes(joined, model, replayed)
    facts = side_facts(rollout, joined.names), side_facts(train, joined.names)
    explanation = explain(comparison, replay=replayed, facts=facts, decode=decode, texts=texts)
    return Diagnosis(
        explanation=explanation,
        replay=replayed,
        names=ReportNames(rollout=_last(rollout.name), train=_last(train.name)),
    )


def _last(name: str) -> str:
    parts: Sequence[str] = Path(name).parts
    return "/".join(parts[-2:])
