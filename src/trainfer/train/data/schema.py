"""Raw rows -> checked rows, in verl's schema.

Takes a row's values; gives a record whose fields have their types, or notes every problem of the row.
The schema: ``data_source`` (text, names the scorer), ``prompt`` (list of ``{role, content}``), ``ability``
(text, optional), ``reward_model`` (``{style, ground_truth}``), ``extra_info`` (object, optional). It
tokenises nothing.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainfer.train.data.files import RawRow
from trainfer.train.data.problems import ProblemList, describe
from trainfer.types import Message

RAW_GSM8K_COLUMNS = frozenset({"question", "answer"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Which columns hold what; the first two are configurable as in verl."""

    prompt: str = "prompt"
    data_source: str = "data_source"
    reward_model: str = "reward_model"
    ability: str = "ability"
    extra_info: str = "extra_info"

    def required(self) -> tuple[str, ...]:
        """Columns that every file must have."""
        return (self.data_source, self.prompt, self.reward_model)

    def read(self) -> frozenset[str]:
        """Columns to read; those of the raw GSM8K files too, so that they are recognised."""
        return frozenset((*self.required(), self.ability, self.extra_info)) | RAW_GSM8K_COLUMNS


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRow:
    """One row with its types proven."""

    path: Path
    number: int
    data_source: str
    messages: tuple[Message, ...]
    ground_truth: str
    ability: str
    extra_info: Mapping[str, object]


class RowChecker:
    """Checks rows one by one and notes what is wrong."""

    def __init__(
        self, columns: Columns, known_data_sources: Collection[str] | None, problems: ProblemList
    ) -> None:
        self._columns = columns
        self._known = None if known_data_sources is None else tuple(sorted(known_data_sources))
        self._problems = problems

    def columns_present(self, path: Path, names: Collection[str]) -> bool:
        """True if a file that has a schema has every required column; else the absent ones are noted."""
        absent = [name for name in self._columns.required() if name not in names]
        for name in absent:
            self._problems.add(
                path,
                column=name,
                found=f"no such column (there are {', '.join(sorted(names)[:20]) or 'none'})",
                wanted=_WANTED_COLUMN.get(name, "the column"),
                remedy=self._conversion(path, names),
            )
        return not absent

    def check(self, row: RawRow) -> CheckedRow | None:
        """Give the record, or None after noting every problem of the row."""
        before = self._problems.count
        if not self._row_has_columns(row):
            return None
        messages = self._messages(row)
        data_source = self._data_source(row)
        ground_truth = self._ground_truth(row)
        ability = self._optional_text(row, self._columns.ability)
        extra_info = row.values.get(self._columns.extra_info)
        if extra_info is not None and not isinstance(extra_info, dict):
            self._note(row, self._columns.extra_info, describe(extra_info), "an object")
        if self._problems.count > before:
            return None
        return CheckedRow(
            path=row.path,
            number=row.number,
            data_source=data_source,
            messages=messages,
            ground_truth=ground_truth,
            ability=ability,
            extra_info=extra_info if isinstance(extra_info, dict) else {},
        )

    def _row_has_columns(self, row: RawRow) -> bool:
        absent = [name for name in self._columns.required() if name not in row.values]
        for name in absent:
            self._note(
                row,
                name,
                "no such key",
                _WANTED_COLUMN.get(name, "the column"),
                remedy=self._conversion(row.path, row.values.keys()),
            )
        return not absent

    def _messages(self, row: RawRow) -> tuple[Message, ...]:
        column, value = self._columns.prompt, row.values[self._columns.prompt]
        if not isinstance(value, list) or not value:
            remedy = (
                'write text as one message: [{"role": "user", "content": TEXT}]'
                if isinstance(value, str)
                else None
            )
            self._note(row, column, describe(value), "a list of chat messages {role, content}", remedy=remedy)
            return ()
        messages = []
        for index, message in enumerate(value):
            place = f"{column}[{index}]"
            if not isinstance(message, dict):
                self._note(row, place, describe(message), "an object {role, content}")
                continue
            role, content = message.get("role"), message.get("content")
            others = sorted(
                str(key)
                for key, held in message.items()
                if key not in {"role", "content"} and held is not None
            )
            if not isinstance(role, str) or not role:
                self._note(row, f"{place}.role", describe(role), "text, e.g. user")
            elif not isinstance(content, str):
                self._note(
                    row,
                    f"{place}.content",
                    describe(content),
                    "text (images, sound and tools are not supported)",
                )
            elif others:
                self._note(row, place, f"the further keys {', '.join(others)}", "role and content alone")
            else:
                messages.append(Message(role=role, content=content))
        return tuple(messages)

    def _data_source(self, row: RawRow) -> str:
        column, value = self._columns.data_source, row.values[self._columns.data_source]
        if not isinstance(value, str) or not value:
            self._note(
                row, column, describe(value), "text that names the scorer", remedy=self._known_remedy()
            )
            return ""
        if self._known is not None and value not in self._known:
            self._note(row, column, describe(value), "a name that has a scorer", remedy=self._known_remedy())
        return value

    def _ground_truth(self, row: RawRow) -> str:
        column, value = self._columns.reward_model, row.values[self._columns.reward_model]
        if not isinstance(value, dict):
            self._note(row, column, describe(value), "an object {style, ground_truth}")
            return ""
        if value.get("style") == "model":
            self._note(row, f"{column}.style", "text 'model'", "'rule': there are no reward models here")
        truth = value.get("ground_truth")
        if isinstance(truth, str) and truth.strip():
            return truth
        remedy = None
        if isinstance(truth, (int, float)):
            remedy = (
                f"write numbers as text (\"{truth}\"): a response is text, and {truth} never equals '{truth}'"
            )
        self._note(row, f"{column}.ground_truth", describe(truth), "text that is not empty", remedy=remedy)
        return ""

    def _optional_text(self, row: RawRow, column: str) -> str:
        value = row.values.get(column)
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        self._note(row, column, describe(value), "text")
        return ""

    def _note(self, row: RawRow, column: str, found: str, wanted: str, *, remedy: str | None = None) -> None:
        self._problems.add(row.path, row=row.number, column=column, found=found, wanted=wanted, remedy=remedy)

    def _known_remedy(self) -> str | None:
        return None if self._known is None else f"known data sources: {', '.join(self._known)}"

    def _conversion(self, path: Path, names: Collection[str]) -> str:
        if set(names) >= RAW_GSM8K_COLUMNS:
            target = path.with_name(f"{path.stem}_verl.parquet")
            return (
                f"this looks like raw GSM8K; convert it: python -m trainfer.train.data.gsm8k {path} {target}"
            )
        return (
            "each row needs data_source, prompt, reward_model (ability and extra_info are optional); "
            "data.prompt_key and data.reward_fn_key rename the first two"
        )


_WANTED_COLUMN = {
    "prompt": "the prompt as a list of chat messages {role, content}",
    "data_source": "the name of the scorer",
    "reward_model": "an object {style, ground_truth}",
}
