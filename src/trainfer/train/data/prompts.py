"""Data files -> a table of tokenised prompts.

Takes paths and a tokenizer; gives ``types.Prompt`` records and the counts of what was left out or cut.
All rows are checked before the first is tokenised, and everything wrong with them is one message. Which
prompts a step takes is ``order``'s business.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import jinja2

from trainfer.errors import DataError, ModelError
from trainfer.train.data.files import check_paths, column_names, read_rows
from trainfer.train.data.order import permutation
from trainfer.train.data.problems import ProblemList
from trainfer.train.data.schema import CheckedRow, Columns, RowChecker
from trainfer.types import Prompt

Truncation = Literal["error", "left", "right", "middle"]


class ChatTokenizer(Protocol):
    """What the data asks of a tokenizer; a Transformers tokenizer has it."""

    @property
    def chat_template(self) -> object:
        """Jinja template of a chat; None where the tokenizer has none."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **kwargs: Any,
    ) -> object:
        """Token ids of a chat, as a list, for ``tokenize=True, return_dict=False``."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTable:
    """Prompts of some files, and what became of the other rows."""

    prompts: tuple[Prompt, ...]
    rows_read: int
    """Rows of the files, before ``max_samples`` and filtering."""
    rows_filtered: int
    """Left out because longer than ``max_prompt_length``."""
    rows_truncated: int
    """Kept, but cut to ``max_prompt_length``."""

    def summary(self) -> str:
        """One line for people, e.g. ``480 prompts of 512 rows (32 longer than allowed left out)``."""
        notes = [
            note
            for count, note in (
                (self.rows_filtered, f"{self.rows_filtered} longer than allowed left out"),
                (self.rows_truncated, f"{self.rows_truncated} cut to the allowed length"),
            )
            if count
        ]
        text = f"{len(self.prompts)} prompts of {self.rows_read} rows"
        return f"{text} ({', '.join(notes)})" if notes else text


def load_prompts(
    files: Sequence[str | Path],
    tokenizer: ChatTokenizer,
    *,
    max_prompt_length: int,
    truncation: Truncation = "error",
    filter_overlong_prompts: bool = False,
    prompt_key: str = "prompt",
    reward_fn_key: str = "data_source",
    max_samples: int = -1,
    sample_seed: int | None = None,
    known_data_sources: Collection[str] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> PromptTable:
    """Read, check and tokenise the prompts of some files, in their order.

    Args:
        files: Parquet or JSONL paths.
        tokenizer: applies the chat template, with the generation prompt.
        max_prompt_length: most tokens of one prompt, template included.
        truncation: what happens to longer prompts that were not filtered: an error, or tokens cut off at
            the left, the right or the middle (half of the allowed tokens from each end, as verl).
        filter_overlong_prompts: leave longer prompts out instead.
        prompt_key: column of the chat messages.
        reward_fn_key: column that names the scorer.
        max_samples: most rows used; -1 for all. The first ones, or with ``sample_seed`` a random choice.
        sample_seed: decides that choice.
        known_data_sources: names that have a scorer; None accepts every name.
        chat_template_kwargs: handed to the chat template by name.

    Raises:
        DataError: every problem of every file and row in one message (ten shown, the rest counted).
        ModelError: the tokenizer has no chat template.
    """
    rows = _checked_rows(
        [Path(file) for file in files],
        Columns(prompt=prompt_key, data_source=reward_fn_key),
        known_data_sources,
    )
    chosen = _choose(len(rows), max_samples, sample_seed)
    tokenised = _tokenise([rows[index] for index in chosen], tokenizer, chat_template_kwargs or {})
    prompts = [_prompt(rows[index], index, ids) for index, ids in zip(chosen, tokenised, strict=True)]
    too_long = {prompt.index for prompt in prompts if len(prompt.token_ids) > max_prompt_length}
    if filter_overlong_prompts:
        kept = [prompt for prompt in prompts if prompt.index not in too_long]
    elif truncation == "error":
        _refuse_overlong([(rows[p.index], len(p.token_ids)) for p in prompts], max_prompt_length)
        kept = prompts
    else:
        kept = [
            replace(prompt, token_ids=truncate(prompt.token_ids, max_prompt_length, truncation))
            for prompt in prompts
        ]
    _refuse_empty(kept, files, max_prompt_length)
    return PromptTable(
        prompts=tuple(kept),
        rows_read=len(rows),
        rows_filtered=len(prompts) - len(kept),
        rows_truncated=len(kept) - len(prompts) + len(too_long),
    )


def truncate(
    token_ids: Sequence[int], length: int, truncation: Literal["left", "right", "middle"]
) -> tuple[int, ...]:
    """Cut to ``length`` tokens at one side, or keep ``length // 2`` of the start and the rest of the end."""
    ids = tuple(token_ids)
    if len(ids) <= length:
        return ids
    match truncation:
        case "left":
            return ids[len(ids) - length :]
        case "right":
            return ids[:length]
        case "middle":
            start = length // 2
            return ids[:start] + ids[len(ids) - (length - start) :]


def _checked_rows(
    paths: list[Path], columns: Columns, known_data_sources: Collection[str] | None
) -> list[CheckedRow]:
    if not paths:
        raise DataError("no data file is named; set data.train_files to a Parquet or JSONL file.")
    problems = ProblemList()
    check_paths(paths, problems)
    problems.raise_if_any()
    checker = RowChecker(columns, known_data_sources, problems)
    rows: list[CheckedRow] = []
    for path in paths:
        before = problems.count
        names = column_names(path, problems)
        if problems.count > before or (names is not None and not checker.columns_present(path, names)):
            continue
        rows_before = len(rows)
        for raw in read_rows(path, columns.read(), problems):
            checked = checker.check(raw)
            if checked is not None:
                rows.append(checked)
        if len(rows) == rows_before and problems.count == before:
            problems.add(path, found="no rows", wanted="at least one row")
    problems.raise_if_any()
    return rows


def _choose(num_rows: int, max_samples: int, sample_seed: int | None) -> list[int]:
    if max_samples == 0:
        raise DataError(
            "data.train_max_samples and data.val_max_samples take -1 (all rows) or 1 and more, not 0."
        )
    if max_samples < 0 or max_samples >= num_rows:
        return list(range(num_rows))
    if sample_seed is None:
        return list(range(max_samples))
    return sorted(permutation(num_rows, seed=sample_seed, epoch=0)[:max_samples])


def _tokenise(
    rows: Sequence[CheckedRow], tokenizer: ChatTokenizer, template_kwargs: Mapping[str, object]
) -> list[tuple[int, ...]]:
    if tokenizer.chat_template is None:
        raise ModelError(
            "the tokenizer has no chat template, so chat messages cannot become tokens. Set "
            "actor_rollout_ref.model.custom_chat_template to a Jinja template, or use an instruction-tuned model."
        )
    problems = ProblemList()
    tokenised = [_token_ids(tokenizer, row, template_kwargs, problems) for row in rows]
    problems.raise_if_any()
    return tokenised


def _token_ids(
    tokenizer: ChatTokenizer, row: CheckedRow, template_kwargs: Mapping[str, object], problems: ProblemList
) -> tuple[int, ...]:
    try:
        ids = tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in row.messages],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **template_kwargs,
        )
    except jinja2.TemplateError as error:
        problems.add(
            row.path,
            row=row.number,
            column="prompt",
            found=f"messages that the chat template refuses ({error})",
            wanted="messages that it takes",
        )
        return ()
    assert isinstance(ids, list), f"apply_chat_template gave {type(ids).__name__}, not a list of token ids"
    if not ids:
        problems.add(row.path, row=row.number, column="prompt", found="no token", wanted="at least one token")
    return tuple(ids)


def _refuse_overlong(lengths: Sequence[tuple[CheckedRow, int]], limit: int) -> None:
    problems = ProblemList()
    for row, length in lengths:
        if length > limit:
            problems.add(
                row.path,
                row=row.number,
                column="prompt",
                found=f"{length} tokens",
                wanted=f"at most data.max_prompt_length={limit}",
                remedy="raise data.max_prompt_length, set data.filter_overlong_prompts=true to leave such rows out, "
                "or data.truncation=left, right or middle to cut them",
            )
    problems.raise_if_any()


def _refuse_empty(kept: Sequence[Prompt], files: Sequence[str | Path], limit: int) -> None:
    if not kept:
        raise DataError(
            f"no prompt is left of {', '.join(map(str, files))}: all rows have more than {limit} tokens. Raise "
            "data.max_prompt_length."
        )


def _prompt(row: CheckedRow, index: int, token_ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        index=index,
        data_source=row.data_source,
        messages=row.messages,
        token_ids=token_ids,
        ground_truth=row.ground_truth,
        ability=row.ability,
        extra_info=row.extra_info,
    )
