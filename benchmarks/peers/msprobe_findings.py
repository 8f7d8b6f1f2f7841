"""The peer of ``benchmarks/compare_findings.py``: msProbe's own PrecisionDebugger on the planted faults.

Runs in msProbe's environment and imports nothing of trainfer. Writes ``FOLDER/CASE/SIDE/stepN/rank0``, as msProbe does; only
the folder ``proc…``, which it uses where there is no process group, is renamed to ``rank0``: its comparison of whole steps
wants rank folders. One process a side: its debugger is there once a process.

usage: msprobe_findings.py FOLDER CASE…
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from msprobe.pytorch import PrecisionDebugger
from planted import BY_NAME, Case, play


class MsprobeWatch:
    def __init__(self, model, folder: Path) -> None:
        self.model = model
        self.debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=str(folder))

    @contextmanager
    def forward(self):
        self.debugger.start(model=self.model)
        yield
        self.debugger.stop()

    def scored(self, sequences, logprobs) -> None:
        """Its dumps have no place for log-probs."""

    def step(self) -> None:
        self.debugger.step()


def dump(case: Case, side: str, folder: Path) -> None:
    @contextmanager
    def watch(model):
        watching = MsprobeWatch(model, folder)
        yield watching
        watching.step()

    play(case, side, watch)
    for path in folder.glob("step*/proc*"):
        path.rename(path.with_name("rank0"))


def main(folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    for name in cases:
        for side in ("rollout", "train"):
            child = os.fork()
            if child == 0:
                try:
                    dump(BY_NAME[name], side, Path(folder) / name / side)
                finally:
                    sys.stdout.flush()
                os._exit(0)
            if os.waitpid(child, 0)[1] != 0:
                raise SystemExit(f"msProbe's capture of {name}, {side}, failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
