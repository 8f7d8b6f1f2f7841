"""Stage 1: did both sides see the same tokens?

Takes the recorded sequences and the executed rows of both sides; gives how sequences correspond and where ids
differ: side against side, and each side's record against what it ran. Sequences that were run and that nobody
recorded (warm-up, profiling) are counted, not compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainfer.check.align.edits import common_prefix, edit_script, lag
from trainfer.check.align.rows import ExecutedSequence, PrefixIndex, RawTables, label_executed
from trainfer.check.align.sequences import SequenceJoin, join_sequences, recorded_sequences
from trainfer.check.align.side import Side
from trainfer.check.compare.records import Stage, Status, TokenFinding
from trainfer.check.dump.records import SequenceRecord

Labels = dict[tuple[int, int], int]
"""(rank, executed sequence) -> index into a side's sequences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenResult:
    """What stage 1 found."""

    stage: Stage
    findings: tuple[TokenFinding, ...]
    sequences: tuple[tuple[SequenceRecord, ...], tuple[SequenceRecord, ...]]
    """The rollout's and the train side's: as recorded, or as run where none was recorded."""
    join: SequenceJoin
    labels: tuple[Labels, Labels]
    """Each side's executed sequences as indices into the rollout's sequences."""
    unrecorded: tuple[int, int]
    """Executed sequences that are no recorded one."""


def check_tokens(rollout: Side, train: Side, raw: tuple[RawTables, RawTables]) -> TokenResult:
    """Join the sequences of both sides and compare their ids."""
    executed = raw[0].executed(), raw[1].executed()
    recorded = recorded_sequences(rollout), recorded_sequences(train)
    sequences = (recorded[0] or _as_recorded(executed[0]), recorded[1] or _as_recorded(executed[1]))
    join = join_sequences(*sequences) if all(recorded) else _join_by_prefix(*sequences)
    findings = [
        _between(sequences, pair.rollout, pair.train)
        for pair in join.pairs
        if not pair.equal and not _is_prefix(sequences, pair.rollout, pair.train, recorded=all(recorded))
    ]
    own_labels: list[Labels] = []
    unrecorded: list[int] = []
    for name, side, run, own in zip(("rollout", "train"), (rollout, train), executed, sequences, strict=True):
        placed = label_executed(run, PrefixIndex(own))
        own_labels.append({key: label for key, (label, _) in placed.items()})
        unrecorded.append(len(run) - len(placed))
        if recorded[0 if name == "rollout" else 1] and not _filtered(side):
            findings += _against_rows(name, own, run, placed)
    to_rollout = {pair.train: pair.rollout for pair in reversed(join.pairs)}
    labels = (
        own_labels[0],
        {k: to_rollout[label] for k, label in own_labels[1].items() if label in to_rollout},
    )
    return TokenResult(
        stage=_stage(findings, join, sequences, recorded, executed),
        findings=tuple(findings),
        sequences=sequences,
        join=join,
        labels=labels,
        unrecorded=(unrecorded[0], unrecorded[1]),
    )


def _as_recorded(executed: Sequence[ExecutedSequence]) -> tuple[SequenceRecord, ...]:
    """Executed sequences in place of recorded ones: each distinct one once, prefixes of others left out."""
    tokens = {tuple(item.tokens.tolist()) for item in executed if len(item.tokens) and item.positions[0] == 0}
    longest: list[tuple[int, ...]] = []
    for candidate in sorted(tokens, reverse=True):
        if not longest or longest[-1][: len(candidate)] != candidate:
            longest.append(candidate)
    order = {tuple(item.tokens.tolist()): number for number, item in reversed(list(enumerate(executed)))}
    longest.sort(key=lambda item: order[item])
    return tuple(
        SequenceRecord(
            index=index,
            tokens=item,
            prompt_length=len(item),
            logprobs=(),
            sampling={},
            weights_version=0,
            step=0,
            pass_name="executed",
        )
        for index, item in enumerate(longest)
    )


def _join_by_prefix(first: Sequence[SequenceRecord], second: Sequence[SequenceRecord]) -> SequenceJoin:
    """As ``join_sequences`` where one side's are only known from what it ran: up to the token that it did not run."""
    cut = [_shortened(record, len(record.tokens) - 1) for record in second]
    index = {record.tokens: number for number, record in enumerate(first)}
    whole = join_sequences(first, second)
    pairs = list(whole.pairs)
    for place, pair in enumerate(pairs):
        twin = index.get(cut[pair.train].tokens) if not pair.equal else None
        if twin is not None:
            pairs[place] = type(pair)(rollout=twin, train=pair.train, equal=False)
    return SequenceJoin(pairs=tuple(pairs), rollout_only=whole.rollout_only, train_only=whole.train_only)


def _shortened(record: SequenceRecord, length: int) -> SequenceRecord:
    return SequenceRecord(
        index=record.index,
        tokens=record.tokens[:length],
        prompt_length=min(record.prompt_length, length),
        logprobs=(),
        sampling=record.sampling,
        weights_version=record.weights_version,
        step=record.step,
        pass_name=record.pass_name,
    )


def _is_prefix(
    sequences: tuple[Sequence[SequenceRecord], Sequence[SequenceRecord]], a: int, b: int, *, recorded: bool
) -> bool:
    """Executed rows lack the last sampled token: no difference of ids. Recorded ids must be equal."""
    if recorded:
        return False
    first, second = sequences[0][a].tokens, sequences[1][b].tokens
    return common_prefix(first, second) == min(len(first), len(second))


def _between(
    sequences: tuple[Sequence[SequenceRecord], Sequence[SequenceRecord]], a: int, b: int
) -> TokenFinding:
    first, second = sequences[0][a], sequences[1][b]
    return TokenFinding(
        kind="sides",
        sequence=a,
        edits=edit_script(first.tokens, second.tokens),
        first=first,
        second=second,
        lag=lag(first.tokens, second.tokens),
        other_sequence=_of_other_sample(sequences[0], a, second),
    )


def _of_other_sample(records: Sequence[SequenceRecord], own: int, other: SequenceRecord) -> int | None:
    """The sequence whose prompt was joined to this one's response, by the other side or by what was run."""
    prompt = other.tokens[: other.prompt_length]
    if not prompt or records[own].tokens[: records[own].prompt_length] == prompt:
        return None
    for index, record in enumerate(records):
        if index != own and record.tokens[: record.prompt_length] == prompt:
            return index
    return None


def _filtered(side: Side) -> bool:
    """True where the capture was asked to leave rows out; a bound of its bytes does so only once it is reached."""
    asked, manifest = side.manifest.capture, side.manifest
    if asked.get("max_bytes") is not None and (
        not manifest.complete or manifest.incomplete_reasons or side.problems
    ):
        return True
    return bool(asked.get("prompts_only")) or any(
        asked.get(key) is not None for key in ("token_range", "steps", "ranks")
    )


def _against_rows(
    name: str,
    recorded: Sequence[SequenceRecord],
    executed: Sequence[ExecutedSequence],
    placed: Mapping[tuple[int, int], tuple[int, int]],
) -> list[TokenFinding]:
    """Recorded sequences that no executed one covers, where something else was executed instead."""
    covered = dict.fromkeys(range(len(recorded)), -1)
    strangers: list[ExecutedSequence] = []
    for item in executed:
        label, last = placed.get((item.rank, item.number), (None, -1))
        if label is not None:
            covered[label] = max(covered[label], last)
        ends = label is not None and last == len(recorded[label].tokens) - 1
        if not ends and int(item.positions[-1]) > last:
            strangers.append(item)
    findings: list[TokenFinding] = []
    digest_twins = {record.tokens: index for index, record in enumerate(recorded)}
    for index, record in enumerate(recorded):
        needed = len(record.tokens) - 2
        twin = digest_twins[record.tokens]
        if max(covered[index], covered[twin]) >= needed or not strangers:
            continue
        stranger = max(strangers, key=lambda item: _likeness(record.tokens, item))
        tokens = tuple(stranger.tokens.tolist())
        if _likeness(record.tokens, stranger) * 2 < min(len(tokens), len(record.tokens)):
            continue
        strangers.remove(stranger)
        run = _shortened_to(record, tokens)
        findings.append(
            TokenFinding(
                kind=name,
                sequence=index,
                edits=edit_script(record.tokens[: len(tokens) + 1], tokens),
                first=record,
                second=run,
                lag=lag(record.tokens, tokens),
                other_sequence=_of_other_sample(recorded, index, run),
                note=f"recorded ids are not those that were run by rank {stranger.rank}",
            )
        )
    return findings


def _shortened_to(record: SequenceRecord, tokens: tuple[int, ...]) -> SequenceRecord:
    return SequenceRecord(
        index=record.index,
        tokens=tokens,
        prompt_length=min(record.prompt_length, len(tokens)),
        logprobs=(),
        sampling={},
        weights_version=record.weights_version,
        step=record.step,
        pass_name="executed",
    )


def _likeness(tokens: Sequence[int], item: ExecutedSequence) -> int:
    """Tokens that two sequences share, whatever their place."""
    left: dict[int, int] = {}
    for token in tokens:
        left[token] = left.get(token, 0) + 1
    shared = 0
    for token in item.tokens.tolist():
        if left.get(token, 0) > 0:
            left[token] -= 1
            shared += 1
    return shared


def _stage(
    findings: Sequence[TokenFinding],
    join: SequenceJoin,
    sequences: tuple[Sequence[SequenceRecord], Sequence[SequenceRecord]],
    recorded: tuple[Sequence[SequenceRecord], Sequence[SequenceRecord]],
    executed: tuple[Sequence[ExecutedSequence], Sequence[ExecutedSequence]],
) -> Stage:
    counts = f"{len(sequences[0])} sequences in the rollout, {len(sequences[1])} in training"
    alone = len(join.rollout_only) + len(join.train_only)
    extra = f"; {alone} have no partner" if alone else ""
    if findings:
        differ = len({finding.sequence for finding in findings})
        return Stage(
            name="tokens", status=Status.DIVERGED, summary=f"{counts}: ids differ in {differ}{extra}"
        )
    if not any(pair.equal for pair in join.pairs) and not (executed[0] and executed[1]):
        return Stage(name="tokens", status=Status.NOT_CHECKED, summary=f"{counts}: nothing to join{extra}")
    equal = sum(pair.equal for pair in join.pairs)
    source = "recorded" if all(recorded) else "executed"
    return Stage(
        name="tokens",
        status=Status.EQUAL,
        summary=f"{equal or len(join.pairs)} {source} sequences have equal ids{extra}",
    )
