"""What trainfer costs vLLM and verl where it is installed and nobody asked for it: CPU time of loading its entry points.

``python benchmarks/entry_points.py [REPEATS]``: one new process a repeat; prints median and largest. Finding the entry points in the
environment's metadata is left out: vLLM and verl do that with or without trainfer.
"""

import os
import statistics
import subprocess
import sys

GROUPS = {"vllm.general_plugins": "entry.load()()", "verl.plugins": "entry.load()"}
CODE = """
import importlib.metadata, sys, time
(entry,) = importlib.metadata.entry_points(group=sys.argv[1], name="trainfer")
before = time.process_time()
{load}
print(time.process_time() - before)
"""


def main() -> None:
    """Measure both."""
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    plain = {key: value for key, value in os.environ.items() if not key.startswith("TRAINFER_")}
    for group, load in GROUPS.items():
        command = [sys.executable, "-c", CODE.format(load=load), group]
        seconds = [
            float(subprocess.run(command, capture_output=True, text=True, check=True, env=plain).stdout)
            for _ in range(repeats)
        ]
        told = f"median {1e3 * statistics.median(seconds):.2f} ms, largest {1e3 * max(seconds):.2f} ms"
        print(f"{group}: {told} of CPU time in {repeats} processes")


if __name__ == "__main__":
    main()
