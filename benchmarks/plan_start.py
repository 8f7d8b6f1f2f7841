"""How long ``trainfer plan`` takes to answer for a launch script, over ``python -c pass``.

    python benchmarks/plan_start.py [--repeat 15]

Runs both in turn, in fresh interpreters, and prints the median difference in wall time and in CPU time, and the
target. Exit code 1 when CPU time is over the target (wall time depends on who else uses the machine).
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET_S = 0.3
SCRIPT = """#!/usr/bin/env bash
TB=${TRAIN_BATCH_SIZE:-1024}
DATA=(data.train_batch_size=$TB data.max_prompt_length=512 data.max_response_length=$((2 * 512)))
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "${DATA[@]}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 \\
    trainer.n_gpus_per_node=8 "$@"
"""


def seconds(command):
    """Wall and CPU seconds of one command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "run.sh"
        script.write_text(SCRIPT)
        plan = [sys.executable, "-m", "trainfer.cli.main", "plan", str(script)]
        empty = [sys.executable, "-c", "pass"]
        seconds(plan)  # compiles the modules once
        pairs = [(seconds(empty), seconds(plan)) for _ in range(repeat)]
    wall = statistics.median(planned[0] - nothing[0] for nothing, planned in pairs)
    cpu = statistics.median(planned[1] - nothing[1] for nothing, planned in pairs)
    print(f"trainfer plan over python -c pass, median of {repeat}: {wall:.3f} s wall, {cpu:.3f} s CPU")
    print(f"target: {TARGET_S} s; ratio {cpu / TARGET_S:.2f} of it in CPU time")
    sys.exit(cpu > TARGET_S)


if __name__ == "__main__":
    main()
