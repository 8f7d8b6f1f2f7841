"""GSM8K as published (``question``, ``answer``) -> verl's schema.

``python -m trainfer.train.data.gsm8k RAW.parquet OUT.parquet [SPLIT]`` does what verl's preprocessing
does: the instruction is appended to the question, and what follows ``####`` in the answer, without its
thousands commas, is the ground truth.
"""

import re
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

from trainfer.errors import DataError, TrainferError
from trainfer.train.data.files import RawRow, check_paths, read_rows
from trainfer.train.data.problems import ProblemList, describe

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def convert(source: Path, target: Path, *, split: str = "train") -> int:
    """Write ``source`` (Parquet or JSONL with ``question`` and ``answer``) as ``target``; gives the number of rows.

    Raises:
        DataError: a row lacks one of the two, or its answer has no ``#### NUMBER``; ``target`` exists.
    """
    if target.exists():
        raise DataError(f"{target} exists and is not overwritten; remove it or name another file.")
    problems = ProblemList()
    check_paths([source], problems)
    problems.raise_if_any()
    rows = [
        _converted(row, split, index, problems)
        for index, row in enumerate(read_rows(source, {"question", "answer"}, problems))
    ]
    problems.raise_if_any()
    if not rows:
        raise DataError(f"{source} holds no rows; there is nothing to convert.")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), target)
    return len(rows)


def _converted(row: RawRow, split: str, index: int, problems: ProblemList) -> dict[str, object]:
    question, answer = row.values.get("question"), row.values.get("answer")
    if not isinstance(question, str):
        problems.add(row.path, row=row.number, column="question", found=describe(question), wanted="text")
        return {}
    found = _ANSWER.search(answer) if isinstance(answer, str) else None
    if found is None:
        problems.add(
            row.path,
            row=row.number,
            column="answer",
            found=describe(answer),
            wanted="text with '#### NUMBER'",
        )
        return {}
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": found[1].replace(",", "")},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def main(arguments: list[str]) -> int:
    """Run the conversion from the command line; gives the exit code."""
    if len(arguments) not in {2, 3}:
        sys.stderr.write("usage: python -m trainfer.train.data.gsm8k RAW OUT.parquet [SPLIT]\n")
        return 2
    split = arguments[2] if len(arguments) == 3 else "train"
    try:
        count = convert(Path(arguments[0]), Path(arguments[1]), split=split)
    except TrainferError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"{count} rows written to {arguments[1]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
