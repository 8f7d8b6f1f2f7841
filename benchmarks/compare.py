"""CPU seconds to compare 1,000 tensors: trainfer, and msProbe beside it where its environment is named.

Captures one forward and backward of a small Qwen3-shaped model twice, the second time with one weight disturbed,
and compares the two dumps; then once more with every value disturbed (nothing is bitwise equal: the slow path).

    python benchmarks/compare.py [--msprobe-python PATH] [--repeats 3] [--json]

msProbe writes its own dumps of the same model in its own environment (it needs torch, transformers and
mindstudio-probe) and compares them with its command line; its start-up is measured with ``compare -h`` and taken off.

The comparison reads 480 MB, so its CPU seconds follow what neighbours leave of the caches: ``pace_gb_s`` is the rate at which this process summed 1.6 MB, again and again, right after the comparison. Compare runs
of like pace only.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
BATCH, LENGTH = 2, 256
DISTURBED = "model.layers.6.mlp.down_proj"


def build(disturb: str):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)).eval()
    with torch.no_grad():
        if disturb == "one":
            model.get_submodule(DISTURBED).weight.add_(1e-2)
        elif disturb == "all":
            model.model.embed_tokens.weight.mul_(1 + 1e-6)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return model, ids


def capture_ours(folder: Path, disturb: str) -> None:
    import trainfer

    model, ids = build(disturb)
    with trainfer.capture(model, folder, side="train", pass_name="update", backward=True):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()


def capture_theirs(folder: str, disturb: str) -> None:
    """Runs in msProbe's environment."""
    from msprobe.pytorch import PrecisionDebugger

    model, ids = build(disturb)
    debugger = PrecisionDebugger(task="tensor", level="L0", dump_path=folder)
    debugger.start(model)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    debugger.stop()
    debugger.step()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def pace() -> float:
    """GB per CPU second at which NumPy sums an array that fits a core's share of the cache."""
    import numpy as np

    values = np.ones(400_000, dtype=np.float32)
    start = cpu_seconds()
    for _ in range(2000):
        values.sum()
    return round(2000 * values.nbytes / (cpu_seconds() - start) / 1e9, 1)


def compare_ours(first: Path, second: Path, repeats: int) -> dict[str, float]:
    from trainfer.check.compare.run import run_stages
    from trainfer.check.compare.source import DumpSide

    best, wall, found = float("inf"), float("inf"), None
    for _ in range(repeats):
        cpu, start = cpu_seconds(), time.perf_counter()
        found = run_stages(DumpSide(first), DumpSide(second))
        best = min(best, cpu_seconds() - cpu)
        wall = min(wall, time.perf_counter() - start)
    assert found is not None
    tensors = len(found.points)
    megabytes = (
        sum(f.stat().st_size for folder in (first, second) for f in folder.rglob("*.safetensors")) / 1e6
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "tensors": tensors,
        "megabytes_read": round(megabytes, 1),
        "cpu_s": round(best, 3),
        "wall_s": round(wall, 3),
        "cpu_s_per_1000": round(1000 * best / tensors, 3),
        "pace_gb_s": pace(),
        "peak_rss_mb": round(peak, 1),
        "bitwise_equal_tensors": sum(p.status.value == "equal" for p in found.points),
    }


def child_cpu(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare_theirs(python: str, work: Path, repeats: int) -> dict[str, float]:
    for name, disturb in (("a", "none"), ("b", "one")):
        subprocess.run(
            [python, __file__, "--capture-msprobe", str(work / name), "--disturb", disturb], check=True
        )
    steps = [next((work / name).glob("step*")) for name in ("a", "b")]
    ranks = [next(step.iterdir()) for step in steps]
    msprobe = str(Path(python).parent / "msprobe")
    start_up = min(child_cpu([msprobe, "compare", "-h"]) for _ in range(repeats))
    paths = ["-tp", str(ranks[1] / "dump.json"), "-gp", str(ranks[0] / "dump.json"), "-o", str(work / "out")]
    total = min(child_cpu([msprobe, "compare", *paths]) for _ in range(repeats))
    result = max((work / "out").glob("*.csv"), key=os.path.getmtime)
    rows = len(result.read_text(encoding="utf-8").splitlines()) - 1
    return {
        "tensors": rows,
        "cpu_s": round(total - start_up, 2),
        "start_up_cpu_s": round(start_up, 2),
        "cpu_s_per_1000": round(1000 * (total - start_up) / rows, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--msprobe-python", help="python of an environment that has mindstudio-probe")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--capture-msprobe", help=argparse.SUPPRESS)
    parser.add_argument("--disturb", default="none", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.capture_msprobe:
        capture_theirs(options.capture_msprobe, options.disturb)
        return 0
    work = Path(tempfile.mkdtemp(prefix="trainfer-compare-"))
    try:
        for disturb in ("none", "one", "all"):
            capture_ours(work / disturb, disturb)
        results = {
            "one weight disturbed": compare_ours(work / "none", work / "one", options.repeats),
            "every value disturbed": compare_ours(work / "none", work / "all", options.repeats),
        }
        if options.msprobe_python:
            (work / "msprobe").mkdir()
            theirs = compare_theirs(options.msprobe_python, work / "msprobe", options.repeats)
            ours = results["one weight disturbed"]["cpu_s_per_1000"]
            results["msProbe, one weight disturbed"] = theirs | {
                "ratio": round(theirs["cpu_s_per_1000"] / ours, 1)
            }
    finally:
        shutil.rmtree(work)
    if options.json:
        print(json.dumps(results, indent=1))
    for name, numbers in {} if options.json else results.items():
        print(name)
        for key, value in numbers.items():
            print(f"  {key:<24}{value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
