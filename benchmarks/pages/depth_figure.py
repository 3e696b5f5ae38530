"""Draws docs/depth.svg from benchmarks/results/depth.jsonl (needs matplotlib).

python benchmarks/pages/depth_figure.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

from table import ROOT, STACKS, depth_rows

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"Transformer": "#00BBF9", "SigmaInformer": "#9B5DE5", "Informer": "#FFB60A"}
STYLES = {"default": "-", "variance": "--", "none": ":"}


def variances(axis: Any, rows: list[dict[str, Any]], n: int) -> None:
    for model, scale, name in STACKS[:6]:
        for row in depth_rows(rows, "activations", model=model, scale=scale, n=n, norm_first=True):
            values = row["layer_variance"]
            axis.semilogy(range(1, 1 + len(values)), values, STYLES[scale], color=COLOURS[model], label=name)
    axis.set(title=f"pre-norm, N = {n}", xlabel="layer", ylabel="variance of activations")


def curves(axis: Any, rows: list[dict[str, Any]]) -> None:
    for model, scale, _ in STACKS[:6]:
        losses = [r["loss"] for r in depth_rows(rows, "training", model=model, scale=scale, layers=12, n=32)]
        steps = [10 * i + 5 for i in range(len(losses[0]))]
        mean = [sum(each) / len(each) for each in zip(*losses, strict=True)]
        axis.plot(steps, mean, STYLES[scale], color=COLOURS[model])
        axis.fill_between(
            steps,
            [min(e) for e in zip(*losses, strict=True)],
            [max(e) for e in zip(*losses, strict=True)],
            color=COLOURS[model],
            alpha=0.12,
            linewidth=0,
        )
    axis.axhline(0.5, color="#667799", linewidth=0.8)
    axis.annotate("no mixing", (198, 0.51), ha="right", color="#667799", fontsize=8)
    axis.set(title="12 layers, post-norm, N = 32", xlabel="step", ylabel="loss", ylim=(0, 1.5))


def main() -> None:
    lines = (ROOT / "benchmarks" / "results" / "depth.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    plt.rcParams |= {"svg.hashsalt": "intention", "font.size": 9, "svg.fonttype": "none"}
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    variances(axes[0], rows, 32)
    variances(axes[1], rows, 512)
    curves(axes[2], rows)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    figure.savefig(Path(ROOT) / "docs" / "depth.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
