"""Where a decode step and a training step spend the device's time: kernels by total time.

python benchmarks/gpu/decode_profile.py [--sequences 64] [--context 1000]
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from shapes import qwen3_06b, requests_of
from torch.profiler import ProfilerActivity, profile

from trainfer.engines.limits import EngineLimits
from trainfer.engines.registry import make_engine


def table(events: profile, divisor: float, rows: int) -> None:
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in events.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:90]][0] += event.device_time
            times[event.name[:90]][1] += 1
    total = sum(time for time, _ in times.values())
    print(f"device time {total / divisor / 1000:.3f} ms a step")
    for name, (time, count) in sorted(times.items(), key=lambda item: -item[1][0])[:rows]:
        print(f"  {time / divisor:8.1f} us  {count / divisor:6.1f} x {time / count:7.2f} us  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=1000)
    arguments = parser.parse_args()
    engine = make_engine(
        "builtin", model=qwen3_06b(), limits=EngineLimits(max_num_seqs=64, max_num_batched_tokens=65536)
    )
    engine.generate(requests_of(arguments.sequences, prompt=arguments.context, new=17))
    with profile(activities=[ProfilerActivity.CUDA]) as events:
        engine.generate(requests_of(arguments.sequences, prompt=arguments.context, new=33))
    print("64 sequences: prefill and 32 decode steps, per decode step")
    table(events, 32, 40)


if __name__ == "__main__":
    main()
