"""What is in a dump: counts and damage, read in one pass.

Takes a ``Dump``; gives plain records for ``trainfer inspect``. Memory does not grow with the tensors: each blob is
read, verified and dropped. No torch.
"""

from collections import Counter
from dataclasses import dataclass, field

from trainfer.check.dump.reader import DamagedRecordError, Dump
from trainfer.check.dump.records import Blob, CallRecord, ProblemRecord, RowsRecord, TensorRecord

MAX_NAMED = 100
"""Damaged records that are named one by one; the others are only counted."""


@dataclass(kw_only=True, slots=True)
class PassSummary:
    """One pass of one step of one rank."""

    rank: int
    step: int
    pass_name: str
    calls: int = 0
    records: int = 0
    rows: int = 0
    padding: int = 0
    discarded: int = 0
    unknown_rows: int = 0
    nbytes: int = 0
    """Bytes in shards; an identical storage counts once."""
    weights_versions: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, kw_only=True, slots=True)
class DumpSummary:
    """All that ``trainfer inspect`` shows."""

    side: str
    schema: str
    complete: bool
    incomplete_reasons: tuple[str, ...]
    run_id: str
    created: str
    finished: str | None
    model_class: str
    model_dtype: str
    level: str
    task: str
    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    modules: int
    modules_captured: int
    sequences: int
    weights: dict[int, int]
    """Fingerprinted parameters and buffers by weights version, all ranks."""
    passes: tuple[PassSummary, ...]
    roles: dict[str, int]
    records: int
    damaged_records: int
    damaged: tuple[str, ...]
    """The first ones, with the reason."""
    problems: tuple[str, ...]
    """Lines and files that could not be read, and what the capture itself could not store."""
    verified: bool
    """False where only sizes were looked at."""

    @property
    def is_whole(self) -> bool:
        """True where nothing is missing and nothing damaged."""
        return self.complete and not self.damaged_records and not self.problems


def summarise(dump: Dump, *, verify: bool = True) -> DumpSummary:
    """Read a dump once; ``verify`` takes the checksum of every blob."""
    survey = _Survey(dump, verify=verify)
    for rank in dump.ranks:
        survey.read_rank(rank)
    manifest = dump.manifest
    reasons = [reason for each in dump.manifests.values() for reason in each.incomplete_reasons]
    unfinished = [
        f"rank {rank} never finished" for rank, each in dump.manifests.items() if each.finished is None
    ]
    return DumpSummary(
        side=dump.side,
        schema=manifest.schema,
        complete=dump.complete,
        incomplete_reasons=(
            *unfinished,
            *(f"rank {rank} is missing" for rank in dump.missing_ranks),
            *reasons,
        ),
        run_id=manifest.run_id,
        created=manifest.created,
        finished=manifest.finished,
        model_class=manifest.model_class,
        model_dtype=manifest.model_dtype,
        level=str(manifest.capture.get("level")),
        task=str(manifest.capture.get("task")),
        ranks=dump.ranks,
        missing_ranks=dump.missing_ranks,
        modules=len(manifest.modules),
        modules_captured=len(survey.modules),
        sequences=sum(1 for rank in dump.ranks for _ in dump.sequences(rank)),
        weights=dict(Counter(record.weights_version for rank in dump.ranks for record in dump.weights(rank))),
        passes=tuple(survey.passes.values()),
        roles=dict(survey.roles),
        records=sum(survey.roles.values()),
        damaged_records=survey.num_damaged,
        damaged=tuple(survey.damaged),
        problems=(*dump.problems, *survey.problems),
        verified=verify,
    )


class _Survey:
    """Counts while reading."""

    def __init__(self, dump: Dump, *, verify: bool) -> None:
        self._dump = dump
        self._verify = verify
        self._states: dict[tuple[int, str, int], str] = {}
        self._table_rows: dict[tuple[int, int], int] = {}
        self.passes: dict[tuple[int, int, str], PassSummary] = {}
        self.roles: Counter[str] = Counter()
        self.modules: set[str] = set()
        self.num_damaged = 0
        self.damaged: list[str] = []
        self.problems: list[str] = []

    def read_rank(self, rank: int) -> None:
        for record in self._dump.index(rank):
            if isinstance(record, TensorRecord):
                self._count_tensor(rank, record)
            elif isinstance(record, CallRecord):
                self._count_call(rank, record)
            elif isinstance(record, ProblemRecord):
                self.problems.append(f"rank {rank}: {record.module or 'model'}: {record.message}")
            else:
                self._count_rows(rank, record)

    def _pass(self, rank: int, step: int, pass_name: str) -> PassSummary:
        key = (rank, step, pass_name)
        if key not in self.passes:
            self.passes[key] = PassSummary(rank=rank, step=step, pass_name=pass_name)
        return self.passes[key]

    def _count_tensor(self, rank: int, record: TensorRecord) -> None:
        summary = self._pass(rank, record.step, record.pass_name)
        summary.records += 1
        self.roles[record.role.value] += 1
        self.modules.add(record.module)
        if record.blob is not None:
            self._check(
                rank, record.blob, f"record {record.id} ({record.module} {record.role.value})", summary
            )

    def _count_call(self, rank: int, record: CallRecord) -> None:
        summary = self._pass(rank, record.step, record.pass_name)
        summary.calls += 1
        summary.padding += record.counts.padding
        summary.unknown_rows += record.counts.unknown
        summary.discarded += record.counts.discarded
        summary.rows += self._table_rows.get((rank, record.table), 0)
        summary.weights_versions.add(record.weights_version)

    def _count_rows(self, rank: int, record: RowsRecord) -> None:
        self._table_rows[rank, record.table] = record.rows
        if record.blob is not None:
            self._check(rank, record.blob, f"row table {record.table}", None)

    def _check(self, rank: int, blob: Blob, name: str, summary: PassSummary | None) -> None:
        """Each blob is read once; every record that shares a damaged one is damaged."""
        key = (rank, blob.shard, blob.offset)
        if key not in self._states:
            self._states[key] = self._state(rank, blob)
            if summary is not None:
                summary.nbytes += blob.nbytes
        reason = self._states[key]
        if reason:
            self.num_damaged += 1
            if len(self.damaged) < MAX_NAMED:
                self.damaged.append(f"rank {rank}, {name}: {reason}")

    def _state(self, rank: int, blob: Blob) -> str:
        try:
            if self._verify:
                self._dump.read(rank, blob)
            else:
                self._dump.check(rank, blob)
        except DamagedRecordError as error:
            return str(error)
        return ""
