"""Draws ``smollm2_sums.svg`` from the two ``.jsonl`` files beside it: ``python docs/figures/smollm2_sums.py`` (needs matplotlib)."""

import json
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
SIDES = {"exact": ("exact", "#1f6feb"), "ordinary": ("exact off", "#d1741d")}


def main() -> None:
    """Two panels: reward and held-out accuracy; log-prob differences."""
    mpl.rcParams["svg.hashsalt"] = "trainfer"
    figure, (reward, gap) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, (label, colour) in SIDES.items():
        lines = (HERE / f"smollm2_sums_{name}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        steps = [row["step"] for row in rows]
        reward.plot(steps, [row["critic/score/mean"] for row in rows], color=colour, linewidth=1, label=label)
        held_out = [
            (row["step"], value) for row in rows for key, value in row.items() if key.startswith("val-")
        ]
        reward.plot(*zip(*held_out, strict=True), "o", color=colour, markersize=4)
        gap.plot(steps, [row["mismatch/logp_abs_diff_max"] for row in rows], color=colour, label=label)
    reward.set(xlabel="step", ylabel="score", title="lines: training score; dots: held out, greedy")
    gap.set(xlabel="step", ylabel="max |Δ log p|", ylim=(-0.001, 0.02), title="rollout against training")
    reward.legend(frameon=False)
    figure.savefig(HERE / "smollm2_sums.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
