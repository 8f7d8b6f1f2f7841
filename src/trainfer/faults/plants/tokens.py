"""tokens.*: the training side scores other ids than the rollout made, or log-probs stand beside other tokens."""

from collections.abc import Callable, Sequence

from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected, Token

BOS = 1


def _chosen(pair: Pair) -> int:
    """The sequence that is hit: not the first two, which are twins."""
    return 2 + pair.seed % 2


def _edited(batch: Batch, sequence: int, tokens: Sequence[int], prompt: int) -> Batch:
    all_tokens, lengths = list(batch.tokens), list(batch.prompt_lengths)
    all_tokens[sequence], lengths[sequence] = tuple(tokens), prompt
    return Batch(tokens=tuple(all_tokens), prompt_lengths=tuple(lengths))


def plant_retokenized(pair: Pair) -> Sequence[Expected]:
    """Decoding and encoding again joins two tokens of the response into one that reads the same."""
    hit, offset = _chosen(pair), 1 + pair.seed % 4

    def edit(batch: Batch) -> Batch:
        tokens, prompt = batch.tokens[hit], batch.prompt_lengths[hit]
        at = prompt + offset
        joined = next(t for t in range(1, 60) if t not in tokens)
        return _edited(batch, hit, (*tokens[:at], joined, *tokens[at + 2 :]), prompt)

    pair.train.edit = edit

    def touched(batch: Batch) -> set[Token]:
        at = batch.prompt_lengths[hit] + offset
        return {(hit, at), (hit, at + 1)}

    return [Expected(cause="tokens.retokenized", tokens=touched)]


def plant_retokenized_apart(pair: Pair) -> Sequence[Expected]:
    """Encoding again splits one token of the response into two."""
    hit, offset = _chosen(pair), 1 + pair.seed % 4

    def edit(batch: Batch) -> Batch:
        tokens, prompt = batch.tokens[hit], batch.prompt_lengths[hit]
        at = prompt + offset
        first, second = [t for t in range(1, 60) if t not in tokens][:2]
        return _edited(batch, hit, (*tokens[:at], first, second, *tokens[at + 1 :]), prompt)

    pair.train.edit = edit
    return [
        Expected(cause="tokens.retokenized", tokens=lambda batch: {(hit, batch.prompt_lengths[hit] + offset)})
    ]


def plant_start_inserted(pair: Pair) -> Sequence[Expected]:
    """The training side puts a start token before every prompt."""

    def edit(batch: Batch) -> Batch:
        return Batch(
            tokens=tuple((BOS, *tokens) for tokens in batch.tokens),
            prompt_lengths=tuple(length + 1 for length in batch.prompt_lengths),
        )

    pair.train.edit = edit
    return [
        Expected(cause="tokens.inserted", tokens=lambda batch: {(s, 0) for s in range(len(batch.tokens))})
    ]


def plant_token_inserted(pair: Pair) -> Sequence[Expected]:
    """One token more within a response."""
    hit, offset = _chosen(pair), pair.seed % 4

    def edit(batch: Batch) -> Batch:
        tokens, prompt = batch.tokens[hit], batch.prompt_lengths[hit]
        new = next(t for t in range(1, 60) if t not in tokens)
        return _edited(batch, hit, (*tokens[: prompt + offset], new, *tokens[prompt + offset :]), prompt)

    pair.train.edit = edit
    return [
        Expected(cause="tokens.inserted", tokens=lambda batch: {(hit, batch.prompt_lengths[hit] + offset)})
    ]


def plant_wrong_sample(pair: Pair) -> Sequence[Expected]:
    """Responses of two prompts are joined to each other's prompt."""

    def edit(batch: Batch) -> Batch:
        a, b = (
            tokens[:length] for tokens, length in zip(batch.tokens[2:], batch.prompt_lengths[2:], strict=True)
        )
        first, second = batch.tokens[2][len(a) :], batch.tokens[3][len(b) :]
        return Batch(
            tokens=(*batch.tokens[:2], (*b, *first), (*a, *second)),
            prompt_lengths=(*batch.prompt_lengths[:2], len(b), len(a)),
        )

    pair.train.edit = edit
    return [Expected(cause="tokens.wrong_sample")]


def plant_logprobs_swapped(pair: Pair) -> Sequence[Expected]:
    """Two samples' log-probs are recorded in each other's place."""

    def swap(logprobs: list[list[float]], *_: object) -> list[list[float]]:
        size = min(len(logprobs[2]), len(logprobs[3]))
        logprobs[2][:size], logprobs[3][:size] = logprobs[3][:size], logprobs[2][:size]
        return logprobs

    pair.shift[pair.case.side] = swap

    def touched(batch: Batch) -> set[Token]:
        return {token for token in batch.responses() if token[0] in (2, 3)}

    return [Expected(cause="tokens.wrong_sample", tokens=touched)]


def plant_cut_at_the_end(pair: Pair) -> Sequence[Expected]:
    """The training side cuts sequences at a maximum length."""

    def limit(batch: Batch) -> int:
        return max(map(len, batch.tokens)) - 3

    def edit(batch: Batch) -> Batch:
        return Batch(
            tokens=tuple(tokens[: limit(batch)] for tokens in batch.tokens),
            prompt_lengths=batch.prompt_lengths,
        )

    pair.train.edit = edit

    def touched(batch: Batch) -> set[Token]:
        return {(s, p) for s, tokens in enumerate(batch.tokens) for p in range(limit(batch), len(tokens))}

    return [Expected(cause="tokens.truncated", tokens=touched)]


def plant_prompt_cut(pair: Pair) -> Sequence[Expected]:
    """The training side cuts long prompts on the left."""

    def edit(batch: Batch) -> Batch:
        longest = max(batch.prompt_lengths) - 3
        cut = [max(0, length - longest) for length in batch.prompt_lengths]
        return Batch(
            tokens=tuple(tokens[c:] for tokens, c in zip(batch.tokens, cut, strict=True)),
            prompt_lengths=tuple(length - c for length, c in zip(batch.prompt_lengths, cut, strict=True)),
        )

    pair.train.edit = edit

    def touched(batch: Batch) -> set[Token]:
        longest = max(batch.prompt_lengths) - 3
        return {
            (s, p) for s, length in enumerate(batch.prompt_lengths) for p in range(max(0, length - longest))
        }

    return [Expected(cause="tokens.truncated", tokens=touched)]


def plant_shift_forgotten(pair: Pair) -> Sequence[Expected]:
    """A token is scored by its own row instead of by the row before it."""

    def own_rows(_: list[list[float]], whole: list[Tensor], batch: Batch) -> list[list[float]]:
        return [
            [float(part[p].log_softmax(-1)[tokens[p]]) for p in range(length, len(tokens))]
            for part, tokens, length in zip(whole, batch.tokens, batch.prompt_lengths, strict=True)
        ]

    pair.shift["train"] = own_rows
    return [Expected(cause="tokens.shifted", tokens=lambda batch: batch.responses())]


def plant_logprobs_one_late(pair: Pair) -> Sequence[Expected]:
    """Recorded log-probs stand one place too late: the list was rolled by one."""

    def roll(logprobs: list[list[float]], *_: object) -> list[list[float]]:
        return [[values[-1], *values[:-1]] for values in logprobs]

    pair.shift[pair.case.side] = roll
    return [Expected(cause="tokens.shifted", tokens=lambda batch: batch.responses())]


def plant_rolled_labels(pair: Pair) -> Sequence[Expected]:
    """Labels are the packed inputs rolled by one, and inputs leave out the last token: the last label is a neighbour's."""

    def rolled(logprobs: list[list[float]], whole: list[Tensor], batch: Batch) -> list[list[float]]:
        count = len(batch.tokens)
        for s, part in enumerate(whole):
            neighbour = batch.tokens[(s + 1) % count][0]
            logprobs[s][-1] = float(part[len(batch.tokens[s]) - 2].log_softmax(-1)[neighbour])
        return logprobs

    pair.train.layout = "packed"
    pair.shift["train"] = rolled

    def last(batch: Batch) -> set[Token]:
        return {(s, len(tokens) - 1) for s, tokens in enumerate(batch.tokens)}

    return [Expected(cause="tokens.packing_roll", tokens=last)]


def _template(pair: Pair, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> None:
    def edit(batch: Batch) -> Batch:
        prompts = [tokens[:length] for tokens, length in zip(batch.tokens, batch.prompt_lengths, strict=True)]
        changed = [change(prompt) for prompt in prompts]
        return Batch(
            tokens=tuple(
                (*new, *tokens[len(old) :])
                for new, old, tokens in zip(changed, prompts, batch.tokens, strict=True)
            ),
            prompt_lengths=tuple(map(len, changed)),
        )

    pair.train.edit = edit


def plant_thinking_dropped(pair: Pair) -> Sequence[Expected]:
    """The chat template leaves out an earlier turn's thinking: a span in the prompt is gone."""
    _template(pair, lambda prompt: (*prompt[:2], *prompt[5:]) if len(prompt) >= 8 else prompt)

    def touched(batch: Batch) -> set[Token]:
        return {(s, p) for s, length in enumerate(batch.prompt_lengths) if length >= 8 for p in (2, 3, 4)}

    return [Expected(cause="tokens.template", tokens=touched)]


def plant_other_role(pair: Pair) -> Sequence[Expected]:
    """The chat template writes another role marker of two tokens at the head of each prompt."""

    def change(prompt: tuple[int, ...]) -> tuple[int, ...]:
        first, second = [t for t in range(1, 60) if t not in prompt][:2]
        return (first, second, *prompt[2:])

    _template(pair, change)
    return [
        Expected(
            cause="tokens.template",
            tokens=lambda batch: {(s, p) for s in range(len(batch.tokens)) for p in (0, 1)},
        )
    ]


_TRAIN = ("train",)
_ONE = ("float32",)


def _fault(
    name: str, plant: Callable[[Pair], Sequence[Expected]], summary: str, sides: tuple[str, ...] = _TRAIN
) -> Fault:
    return Fault(name=name, plant=plant, summary=summary, sides=sides, dtypes=_ONE)


FAULTS = (
    _fault(
        "tokens.retokenized/joined", plant_retokenized, "two response tokens become one when encoded again"
    ),
    _fault(
        "tokens.retokenized/split",
        plant_retokenized_apart,
        "one response token becomes two when encoded again",
    ),
    _fault("tokens.inserted/start", plant_start_inserted, "a start token before every prompt"),
    _fault("tokens.inserted/one", plant_token_inserted, "one token more within a response"),
    _fault(
        "tokens.wrong_sample/prompts", plant_wrong_sample, "two responses stand behind each other's prompt"
    ),
    _fault(
        "tokens.wrong_sample/logprobs",
        plant_logprobs_swapped,
        "two samples' log-probs are swapped",
        ("rollout", "train"),
    ),
    _fault("tokens.truncated/end", plant_cut_at_the_end, "sequences cut at a maximum length"),
    _fault("tokens.truncated/prompt", plant_prompt_cut, "long prompts cut on the left"),
    _fault("tokens.shifted/own_row", plant_shift_forgotten, "a token is scored by its own row"),
    _fault(
        "tokens.shifted/late",
        plant_logprobs_one_late,
        "log-probs recorded one place too late",
        ("rollout", "train"),
    ),
    _fault(
        "tokens.packing_roll/labels",
        plant_rolled_labels,
        "the last label of each packed sequence is its neighbour's",
    ),
    _fault(
        "tokens.template/thinking", plant_thinking_dropped, "a span of three tokens is gone from long prompts"
    ),
    _fault("tokens.template/role", plant_other_role, "another role marker at the head of each prompt"),
)
