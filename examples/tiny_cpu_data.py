"""Writes the demonstration's data: ``tiny_cpu_train.parquet`` and ``tiny_cpu_val.parquet``.

Run it from anywhere: ``python examples/tiny_cpu_data.py [FOLDER]``; without a folder it writes beside itself.

Each row, in verl's schema, asks to reverse five letters; the ground truth is the reversed word, and only that
is rewarded. ``extra_info.demonstrations`` holds the answers that the supervised warm-up teaches: six
ways of rearranging the letters, reversal among them and not preferred. The warmed-up model therefore answers
in one of six ways at random, and GRPO teaches it which one the reward wants. No word is in both files.
"""

import hashlib
import itertools
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet

LETTERS = "abcdefghij"
WORD_LENGTH = 5
TRAIN_ROWS = 512
VAL_ROWS = 64


def words() -> list[str]:
    """Words of five different letters, in an order that the hash of each decides."""
    every = ("".join(letters) for letters in itertools.permutations(LETTERS, WORD_LENGTH))
    return sorted(every, key=lambda word: hashlib.blake2b(word.encode(), digest_size=16).digest())


def demonstrations(word: str) -> list[str]:
    """The word as it is, reversed, with its ends swapped, its inside reversed, rotated left and right."""
    first, inside, last = word[0], word[1:-1], word[-1]
    return [
        word,
        word[::-1],
        last + inside + first,
        first + inside[::-1] + last,
        word[1:] + first,
        last + word[:-1],
    ]


def row(word: str, split: str, index: int) -> dict[str, object]:
    """One row in verl's schema."""
    return {
        "data_source": "trainfer/letters",
        "prompt": [{"role": "user", "content": f"reverse {word}"}],
        "ability": "letters",
        "reward_model": {"style": "rule", "ground_truth": word[::-1]},
        "extra_info": {"split": split, "index": index, "demonstrations": demonstrations(word)},
    }


def tables() -> dict[str, pyarrow.Table]:
    """File name -> its rows."""
    chosen = words()[: TRAIN_ROWS + VAL_ROWS]
    splits = {"train": chosen[:TRAIN_ROWS], "val": chosen[TRAIN_ROWS:]}
    return {
        f"tiny_cpu_{split}.parquet": pyarrow.Table.from_pylist(
            [row(word, split, index) for index, word in enumerate(of_split)]
        )
        for split, of_split in splits.items()
    }


def main(folder: Path) -> None:
    """Write both files."""
    for name, table in tables().items():
        pyarrow.parquet.write_table(table, folder / name)
        print(f"{folder / name}: {table.num_rows} rows")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
