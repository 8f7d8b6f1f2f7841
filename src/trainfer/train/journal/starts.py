"""starts.jsonl: is the data still what the run began with?

Takes the prompts that were read; gives a digest of everything that training sees of them, and compares it with the one that
the latest start recorded. A file that is written anew with the same rows passes; an edited row, another order or another
tokenizer does not.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from trainfer.errors import RunFolderError
from trainfer.types import Prompt

DATA_DIGEST = "data_sha256"
_MAX_LINE_BYTES = 1_000_000


def data_digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over the rows in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        row = [list(prompt.token_ids), prompt.data_source, prompt.ground_truth, prompt.extra_info]
        digest.update(json.dumps(row, sort_keys=True, default=str).encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def check_same_data(starts: Path, digest: str, *, files: Sequence[str]) -> None:
    """Raise where the latest recorded start read other rows; older runs recorded none.

    Raises:
        RunFolderError: the data has changed.
    """
    before = _recorded(starts)
    if before is not None and before != digest:
        raise RunFolderError(
            f"{', '.join(files)} (data.train_files) hold other prompts than when the run in {starts.parent} was last started "
            f"({DATA_DIGEST} {before[:12]}… then, {digest[:12]}… now), so it would go on as another run. Restore the data, or "
            "start a new run with another trainer.default_local_dir."
        )


def _recorded(starts: Path) -> str | None:
    found: str | None = None
    if not starts.is_file():
        return None
    with starts.open("rb") as file:
        while line := file.readline(_MAX_LINE_BYTES):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue  # a torn line
            if isinstance(record, dict) and isinstance(record.get(DATA_DIGEST), str):
                found = record[DATA_DIGEST]
    return found
