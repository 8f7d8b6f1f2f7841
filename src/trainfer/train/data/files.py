"""Data files -> raw rows, one at a time.

Takes a Parquet or JSONL path; gives rows as plain dictionaries of the wanted columns, in the file's
order. Knows file formats only; ``schema`` judges what the rows hold. A Parquet file is read by batches of
rows, a JSONL file by lines of bounded length, so memory does not grow with the file.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec
import pyarrow
import pyarrow.parquet

from trainfer.train.data.problems import ProblemList

ROWS_PER_BATCH = 512
MAX_LINE_BYTES = 16 * 2**20
"""A longer line of JSONL is refused instead of being read into memory."""
LINE_SUFFIXES = (".jsonl", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawRow:
    """One row as it stands in its file."""

    path: Path
    number: int
    """0-based within its file; JSONL counts its lines, blank ones included."""
    values: dict[str, object]


def check_paths(paths: Collection[Path], problems: ProblemList) -> None:
    """Note every path that is no readable file of a known format; opens nothing."""
    for path in paths:
        if path.is_dir():
            inside = sorted(p.name for p in path.iterdir() if p.suffix in {".parquet", *LINE_SUFFIXES})[:5]
            remedy = f"name the files themselves, e.g. {path / inside[0]}" if inside else None
            problems.add(path, found="a folder", wanted="a file", remedy=remedy)
        elif not path.exists():
            problems.add(
                path, found="nothing", wanted="a file", remedy="check data.train_files and data.val_files"
            )
        elif path.suffix != ".parquet" and path.suffix not in LINE_SUFFIXES:
            problems.add(
                path, found=f"the suffix {path.suffix!r}", wanted="a name ending in .parquet or .jsonl"
            )


def read_rows(path: Path, columns: Collection[str], problems: ProblemList) -> Iterator[RawRow]:
    """Yield the rows of one file, limited to ``columns``; what cannot be read is noted.

    A column that a Parquet file lacks is absent from every row.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, columns, problems)
    return _read_lines(path, columns, problems)


def column_names(path: Path, problems: ProblemList) -> tuple[str, ...] | None:
    """Columns of a Parquet file, or None where there is no schema (JSONL) or it cannot be read (noted)."""
    if path.suffix != ".parquet":
        return None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            return tuple(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problems.add(
            path, found=f"bytes that are not Parquet ({_first_line(error)})", wanted="a Parquet file"
        )
        return None


def _read_parquet(path: Path, columns: Collection[str], problems: ProblemList) -> Iterator[RawRow]:
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = [name for name in file.schema_arrow.names if name in columns]
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=present, use_threads=False):
                for values in batch.to_pylist():
                    yield RawRow(path=path, number=number, values=values)
                    number += 1
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        problems.add(
            path, row=number, found=f"damaged data ({_first_line(error)})", wanted="readable Parquet pages"
        )


def _read_lines(path: Path, columns: Collection[str], problems: ProblemList) -> Iterator[RawRow]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file)):
                if len(line) > MAX_LINE_BYTES:
                    wanted = f"a line of at most {MAX_LINE_BYTES} bytes"
                    problems.add(path, row=number, found="a longer line", wanted=wanted)
                    return
                values = _parse_line(path, number, line, columns, problems) if line.strip() else None
                if values is not None:
                    yield RawRow(path=path, number=number, values=values)
    except OSError as error:
        problems.add(path, found=f"a file that cannot be read ({error})", wanted="a readable file")


def _parse_line(
    path: Path, number: int, line: bytes, columns: Collection[str], problems: ProblemList
) -> dict[str, object] | None:
    wanted = "one JSON object a line"
    try:
        values = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        problems.add(path, row=number, found=f"a line that is not JSON ({error})", wanted=wanted)
        return None
    if not isinstance(values, dict):
        remedy = "write JSON Lines: each row an object on its own line, no surrounding list"
        problems.add(
            path, row=number, found=f"JSON of type {type(values).__name__}", wanted=wanted, remedy=remedy
        )
        return None
    return {key: value for key, value in values.items() if key in columns}


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
