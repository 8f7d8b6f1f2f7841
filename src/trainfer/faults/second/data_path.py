"""Faults between the rollout's tokens and the trainer's: text round trips, templates, cuts, rows and rolls.

Takes a pair; changes what the training side takes for the sequences, or the order of recorded log-probs.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from trainfer.faults.fault import Fault
from trainfer.faults.models import END, PAD
from trainfer.faults.pair import Pair
from trainfer.faults.records import Batch, Expected, Token

Part = tuple[int, ...]
Change = Callable[[int, Part, Part, Batch], tuple[Part, Part]]
"""(index, prompt, response, batch) -> prompt and response as the trainer has them."""

LETTERS = 6
WINDOW = 12
MOST = 6


def spell(token: int) -> Part:
    """Letters of a token in a toy vocabulary: 6 letters, all 36 pairs, 20 triples; the end and padding stand alone."""
    if token in (PAD, END):
        return (-token - 1,)
    if token <= LETTERS:
        return (token - 1,)
    number = token - LETTERS - 1
    if number < LETTERS**2:
        return (number // LETTERS, number % LETTERS)
    number -= LETTERS**2
    return (number % LETTERS, number // LETTERS, (5 * number + 1) % LETTERS)


_TOKENS = {spell(token): token for token in range(END + 1)}


def encode(letters: Sequence[int], longest: int = 3) -> Part:
    """Longest match from the left."""
    tokens: list[int] = []
    place = 0
    while place < len(letters):
        size = next(n for n in range(longest, 0, -1) if tuple(letters[place : place + n]) in _TOKENS)
        tokens.append(_TOKENS[tuple(letters[place : place + size])])
        place += size
    return tuple(tokens)


def again(response: Part, longest: int = 3) -> Part:
    """A response decoded to text and encoded again."""
    return encode([letter for token in response for letter in spell(token)], longest)


def edited(change: Change) -> Callable[[Batch], Batch]:
    """The batch with each sequence changed."""

    def edit(batch: Batch) -> Batch:
        pairs = [
            change(index, tokens[:length], tokens[length:], batch)
            for index, (tokens, length) in enumerate(zip(batch.tokens, batch.prompt_lengths, strict=True))
        ]
        return Batch(
            tokens=tuple(prompt + response for prompt, response in pairs),
            prompt_lengths=tuple(len(prompt) for prompt, _ in pairs),
        )

    return edit


def _plant(cause: str, change: Change, pair: Pair) -> list[Expected]:
    pair.train.edit = edited(change)
    return [Expected(cause=cause)]


def round_trip(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """The response goes through text."""
    return prompt, again(response)


def letters(index: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """The third response is spelled letter by letter."""
    return prompt, again(response, 1) if index == 2 else response


def separator(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """A line break between prompt and response."""
    return (*prompt, 9), response


def padding_kept(_: int, prompt: Part, response: Part, batch: Batch) -> tuple[Part, Part]:
    """Padding of the prompts' block stays as tokens."""
    return (PAD,) * (max(batch.prompt_lengths) - len(prompt)) + prompt, response


def rolled(index: int, prompt: Part, _response: Part, batch: Batch) -> tuple[Part, Part]:
    """The next sequence's response stands behind this prompt."""
    other = (index + 1) % len(batch.tokens)
    return prompt, batch.tokens[other][batch.prompt_lengths[other] :]


def short_response(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """The trainer's response length is smaller than the rollout's."""
    return prompt, response[:MOST]


def last_tokens(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """The trainer keeps the last tokens of prompt and response together."""
    return prompt[max(0, len(prompt) + len(response) - WINDOW) :], response


def system(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """Another system prompt: four tokens in place of the first two."""
    return (11, 12, 13, 14, *prompt[2:]), response


def date(_: int, prompt: Part, response: Part, _batch: Batch) -> tuple[Part, Part]:
    """The template writes today's date: the second token is another."""
    return (prompt[0], prompt[1] % 60 + 1, *prompt[2:]), response


# --- recorded log-probs ----------------------------------------------------------------------------------------------

Lists = list[list[float]]


def sorted_order(batch: Batch) -> list[int]:
    """Sequences from the longest to the shortest."""
    return sorted(range(len(batch.tokens)), key=lambda index: -len(batch.tokens[index]))


def in_sorted_order(logprobs: Lists, _: list[Tensor], batch: Batch) -> Lists:
    """The padded block of log-probs in the order of the balanced batch, cut to each row's own length."""
    return [
        (logprobs[source] + [0.0] * len(own))[: len(own)]
        for source, own in zip(sorted_order(batch), logprobs, strict=True)
    ]


def _moved_rows(batch: Batch) -> set[Token]:
    order = sorted_order(batch)
    return {token for token in batch.responses() if order[token[0]] != token[0]}


def plant_sorted(pair: Pair) -> list[Expected]:
    """Log-probs stay in the order of the balanced batch."""
    pair.shift[pair.case.side] = in_sorted_order
    return [Expected(cause="tokens.wrong_sample", tokens=_moved_rows)]


def early(logprobs: Lists, _: list[Tensor], _batch: Batch) -> Lists:
    """One place too early; the last is filled with zero."""
    return [[*own[1:], 0.0] for own in logprobs]


def plant_early(pair: Pair) -> list[Expected]:
    """Log-probs are cut from the block with the wrong slice."""
    pair.shift[pair.case.side] = early
    return [Expected(cause="tokens.shifted", tokens=Batch.responses)]


def from_prompt_end(_: Lists, whole: list[Tensor], batch: Batch) -> Lists:
    """The block starts one token early: at the prompt's last token."""
    return [
        [
            float(logits[place - 1].log_softmax(-1)[tokens[place]])
            for place in range(length - 1, len(tokens) - 1)
        ]
        for logits, tokens, length in zip(whole, batch.tokens, batch.prompt_lengths, strict=True)
    ]


def plant_prompt_end(pair: Pair) -> list[Expected]:
    """The response mask starts one token early."""
    pair.shift["train"] = from_prompt_end
    return [Expected(cause="tokens.shifted", tokens=Batch.responses)]


def wrapped(logprobs: Lists, whole: list[Tensor], batch: Batch) -> Lists:
    """In packed micro-batches of two, the last label of each is the other's first token."""
    return [
        [*own[:-1], float(whole[index][-2].log_softmax(-1)[batch.tokens[index ^ 1][0]])]
        for index, own in enumerate(logprobs)
    ]


def plant_wrapped(pair: Pair) -> list[Expected]:
    """Labels are rolled within each micro-batch."""
    pair.train.micro = (2,)
    pair.shift["train"] = wrapped
    return [
        Expected(
            cause="tokens.packing_roll",
            tokens=lambda batch: {(index, len(tokens) - 1) for index, tokens in enumerate(batch.tokens)},
        )
    ]


def _fault(name: str, change: Change, summary: str) -> Fault:
    cause = name.partition("/")[0]
    return Fault(name=name, plant=partial(_plant, cause, change), summary=summary, sides=("train",))


FAULTS = (
    _fault("tokens.retokenized/round_trip", round_trip, "responses go through text, longest match first"),
    _fault("tokens.retokenized/letters", letters, "one response is spelled letter by letter"),
    _fault("tokens.inserted/separator", separator, "a line break between prompt and response"),
    _fault("tokens.inserted/padding_kept", padding_kept, "left padding stays in the sequences as tokens"),
    _fault("tokens.wrong_sample/rolled", rolled, "each prompt gets the next sequence's response"),
    Fault(
        name="tokens.wrong_sample/balanced", plant=plant_sorted,
        summary="log-probs stay in the order of a batch that was sorted by length",
    ),
    _fault("tokens.truncated/response", short_response, "the trainer's maximum response length is smaller"),
    _fault("tokens.truncated/window", last_tokens, "the trainer keeps the last twelve tokens of each sequence"),
    Fault(name="tokens.shifted/early", plant=plant_early, summary="log-probs stand one place too early"),
    Fault(
        name="tokens.shifted/prompt_end", plant=plant_prompt_end, sides=("train",),
        summary="the block of log-probs starts at the prompt's last token",
    ),
    Fault(
        name="tokens.packing_roll/micro_batch", plant=plant_wrapped, sides=("train",), layouts=("packed",),
        summary="labels are rolled within packed micro-batches of two",
    ),
    _fault("tokens.template/system", system, "another system prompt, of another length"),
    _fault("tokens.template/date", date, "the template's date is another: one token"),
)  # fmt: skip
