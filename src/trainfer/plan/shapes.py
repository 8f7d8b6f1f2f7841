"""The shape of every batch tensor at every stage, under the names of the system that is planned for.

verl 0.6 pads prompts on the left to ``max_prompt_length`` and responses on the right to
``max_response_length``; verl 0.9 keeps one length a row (nested); trainfer packs tokens.
"""

from collections.abc import Callable, Iterator

from trainfer.plan import keys, numbers_trainfer, numbers_verl06, numbers_verl09
from trainfer.plan.asked import Asked, NotKnown, known
from trainfer.plan.records import TensorShape
from trainfer.plan.verl_sizes import longest, replicas, sequence_parallel, uses_ref

_ROLLOUT = ("input_ids", "attention_mask", "position_ids")


def tensors(rules: str, asked: Asked) -> tuple[TensorShape, ...]:
    """All tensors in the order of the step; stages whose sizes are not known are left out."""
    stages = {"verl-0.6": _verl06, "verl-0.9": _verl09, "trainfer": _trainfer}[rules]
    found: list[TensorShape] = []
    for stage in stages(asked):
        try:
            found.extend(stage())
        except NotKnown:
            continue
    return tuple(found)


Stage = Callable[[], list[TensorShape]]


def _padded(stage: str, rows: int, **widths: int) -> list[TensorShape]:
    return [
        TensorShape(stage=stage, name=name, shape=(str(rows), str(width)), layout="padded")
        for name, width in widths.items()
    ]


def _nested(stage: str, rows: int, **widths: int) -> list[TensorShape]:
    return [
        TensorShape(stage=stage, name=name, shape=(str(rows), f"≤ {width}"), layout="nested")
        for name, width in widths.items()
    ]


def _prompt(asked: Asked) -> int:
    return asked.count(keys.PROMPT_TOKENS, 512)


def _response(asked: Asked) -> int:
    return asked.count(keys.RESPONSE_TOKENS, 512)


def _packed_forward(
    stage: str, asked: Asked, rows: int | None, budget_key: str, width: int
) -> list[TensorShape]:
    """One row of tokens: up to the budget where batches are dynamic, else up to ``rows`` full sequences."""
    sp = sequence_parallel(asked)
    tokens = asked.count(budget_key, 16384) * sp if rows is None else rows * width
    split = [] if sp == 1 else [
        TensorShape(stage=f"{stage}, one GPU of {sp}", name="input_ids", shape=("1", f"≤ {-(-tokens // sp)}"), layout="packed")
    ]  # fmt: skip
    return [TensorShape(stage=stage, name="input_ids", shape=("1", f"≤ {tokens}"), layout="packed"), *split]


def _verl06(asked: Asked) -> Iterator[Stage]:
    def rank() -> list[TensorShape]:
        return _padded(
            "each rank",
            numbers_verl06.rows_per_rank(asked),
            input_ids=longest(asked),
            old_log_probs=_response(asked),
        )

    def micro() -> list[TensorShape]:
        is_dynamic = asked.flag(keys.DYNAMIC)
        rows = None if is_dynamic else numbers_verl06.micro_rows(asked)
        if asked.flag(keys.REMOVE_PADDING):
            return _packed_forward("update, one micro-batch", asked, rows, keys.TOKENS, longest(asked))
        if rows is None:
            raise NotKnown(keys.MICRO)
        return _padded("update, one micro-batch", rows, **dict.fromkeys(_ROLLOUT, longest(asked)))

    def after() -> list[TensorShape]:
        total = numbers_verl06.sequences(asked)
        widths = {
            "prompts": _prompt(asked),
            "responses": _response(asked),
            **dict.fromkeys(_ROLLOUT, longest(asked)),
        }
        return _padded("after generation", total, **widths, response_mask=_response(asked))

    def scored() -> list[TensorShape]:
        names = [
            "token_level_scores",
            "old_log_probs",
            *(["ref_log_prob"] if uses_ref(asked) else []),
            "advantages",
            "returns",
        ]
        return _padded("scored", numbers_verl06.sequences(asked), **dict.fromkeys(names, _response(asked)))

    yield lambda: _padded(
        "before generation", numbers_verl06.prompts_per_step(asked), **dict.fromkeys(_ROLLOUT, _prompt(asked))
    )
    yield lambda: _padded("repeated n times", numbers_verl06.sequences(asked), input_ids=_prompt(asked))
    yield lambda: _padded(
        "one rollout engine", numbers_verl06.sequences(asked) // replicas(asked), input_ids=_prompt(asked)
    )
    yield after
    yield scored
    yield rank
    yield lambda: _padded(
        "one mini-batch of a rank", numbers_verl06.mini_rows(asked), input_ids=longest(asked)
    )
    yield micro


def _verl09(asked: Asked) -> Iterator[Stage]:
    def after() -> list[TensorShape]:
        total = numbers_verl09.sequences(asked)
        return _nested(
            "after generation",
            total,
            prompts=_prompt(asked),
            responses=_response(asked),
            input_ids=longest(asked),
            position_ids=longest(asked),
            response_mask=_response(asked),
            rollout_log_probs=_response(asked),
        )

    def scored() -> list[TensorShape]:
        total = numbers_verl09.sequences(asked) + numbers_verl09.padding(asked)
        names = [
            "rm_scores",
            "old_log_probs",
            *(["ref_log_prob"] if uses_ref(asked) else []),
            "advantages",
            "returns",
        ]
        return _nested("scored, padding included", total, **dict.fromkeys(names, _response(asked)))

    def mini() -> list[TensorShape]:
        rows = numbers_verl09.mini_rows(asked)
        return [] if rows is None else _nested("one mini-batch of a rank", rows, input_ids=longest(asked))

    def micro() -> list[TensorShape]:
        rows = None if asked.flag(keys.DYNAMIC) else asked.count(keys.MICRO)
        return _packed_forward("update, one micro-batch", asked, rows, keys.TOKENS, longest(asked))

    yield lambda: _nested("before generation", asked.count(keys.TRAIN, 1024), input_ids=_prompt(asked))
    yield after
    yield scored
    yield lambda: _nested("each rank", numbers_verl09.rows_per_rank(asked), input_ids=longest(asked))
    yield mini
    yield micro


def _trainfer(asked: Asked) -> Iterator[Stage]:
    def forward(stage: str, rows: Callable[[Asked], int]) -> list[TensorShape]:
        sp, count = sequence_parallel(asked), rows(asked)
        shared = {f"{stage}, one micro-batch": count}
        if sp > 1:
            shared[f"{stage}, one micro-batch, one GPU of {sp}"] = count // sp
        return [
            TensorShape(stage=name, name="input_ids", shape=("1", f"≤ {part}"), layout="packed")
            for name, part in shared.items()
            if count
        ]

    total = known(lambda: asked.count(keys.TRAIN) * asked.count(keys.N, 1))
    if total is not None:
        yield lambda: _nested("after generation", total, token_ids=numbers_trainfer.longest_sequence(asked))
    yield lambda: forward("old log-probs", numbers_trainfer.old_log_prob_rows)
    yield lambda: forward("reference log-probs", numbers_trainfer.ref_log_prob_rows)
    yield lambda: forward("update", numbers_trainfer.update_rows)
