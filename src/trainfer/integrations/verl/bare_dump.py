"""A dump of a process that has no model to hook: sequences from a server, weights after a sync.

Takes records; gives a folder in trainfer's dump format. Every record is handed to the disk at once, since verl ends its processes
by killing them; the manifest says ``complete`` while nothing was lost.
"""

import datetime
from pathlib import Path

import msgspec

from trainfer.check.dump.folder import claim, rank_folder, rewrite
from trainfer.check.dump.records import SCHEMA, Manifest
from trainfer.check.dump.writer import DumpWriter


class BareDump:
    """One process's part of a dump; other ranks of the launch may share the folder."""

    def __init__(
        self,
        folder: Path,
        *,
        side: str,
        run_id: str,
        config: dict[str, object],
        rank: int = 0,
        world_size: int = 1,
        model_class: str = "",
    ) -> None:
        """Claim the folder.

        Raises:
            DumpError: it was used before.
            OSError: it cannot be written.
        """
        self.folder = folder
        self.num_records = 0
        self._manifest = Manifest(
            schema=SCHEMA,
            side=side,
            run_id=run_id,
            launch_id=run_id,
            rank=rank,
            world_size=world_size,
            ranks=None,
            created=_now(),
            finished=None,
            complete=False,
            incomplete_reasons=(),
            capture={},
            config=config,
            model_class=model_class,
            model_config={},
            model_dtype="",
            modules=(),
            versions={},
            seed=None,
            counts={},
        )
        claim(folder, self._manifest, leader=0)
        self.writer = DumpWriter(rank_folder(folder, rank))
        self._is_whole: bool | None = None
        self.mark()

    def put(self, record: msgspec.Struct, *, step: int, pass_name: str) -> None:
        """Write a record."""
        self.writer.put(step, pass_name, record)
        self.num_records += 1

    def mark(self) -> None:
        """Hand everything to the disk and say in the manifest how whole it is.

        Raises:
            OSError: the manifest cannot be written.
        """
        self.writer.flush()
        failure = self.writer.failure
        if self._is_whole is (failure is None):
            return
        self._is_whole = failure is None
        final = msgspec.structs.replace(
            self._manifest,
            finished=_now(),
            complete=failure is None,
            incomplete_reasons=() if failure is None else (failure,),
        )
        rewrite(self.folder, final, leader=0)

    def close(self) -> None:
        """End it."""
        self.writer.close()
        self.mark()


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
