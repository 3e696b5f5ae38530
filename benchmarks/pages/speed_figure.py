"""Draws docs/pictures/speed.svg and speed-dark.svg from benchmarks/results/native.json (needs the extra `lab`).

python benchmarks/pages/speed_figure.py
"""

from __future__ import annotations

import json
from typing import Any

from matplotlib.figure import Figure

from intention.lab.experiments.base import COLOURS
from intention.lab.report.figures import to_svg, transparent
from table import ROOT

LINES = {  # as timed, as called, how drawn
    "sdpa": ("F.scaled_dot_product_attention", {"color": COLOURS["attention"], "marker": "s"}),
    "native": ("intention", {"color": COLOURS["intention"], "marker": "o"}),
    "torch": ("intention without compiled kernels", {"color": COLOURS["intention"], "marker": "o", "linestyle": ":"}),
}
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
TITLE = (
    "Milliseconds of one head against the number of points: attention grows with the square, Intention with the number"
)


def milliseconds(result: dict[str, Any], label: str, name: str) -> list[tuple[int, float]]:
    """(N, time of one head) with one thread."""
    return [
        (row["shape"][1], 1e3 * row["seconds"][name] / row["shape"][0])
        for row in result["heads"]
        if row["pass"] == label and row["threads"] == 1
    ]


def draw(result: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    for axes, (label, title) in zip(figure.subplots(1, 2, sharey=True), PASSES.items(), strict=True):
        for name, (called, style) in LINES.items():
            axes.plot(*zip(*milliseconds(result, label, name), strict=True), label=called, markersize=4, **style)
        axes.set(xscale="log", yscale="log", xlabel="points N", title=title)
        ticks = [16, 64, 256, 1024, 4096, 16384, 65536]
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.minorticks_off()
        axes.grid(True)
        ends = {name: milliseconds(result, label, name)[-1] for name in ("sdpa", "native")}
        n, slow = ends["sdpa"]
        fast = ends["native"][1]
        axes.annotate(f"{slow / fast:.0f}×", (n, (slow * fast) ** 0.5), (-8, 0), textcoords="offset points", ha="right")
        axes.annotate("", (n, fast * 1.4), (n, slow / 1.4), arrowprops={"arrowstyle": "<->", "linewidth": 0.8})
    figure.axes[0].set_ylabel("ms for one head, d = k = 64")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "native.json").read_text())
    svg = to_svg(lambda: draw(result), "speed", TITLE)
    for name, dark in (("speed", False), ("speed-dark", True)):
        (ROOT / "docs" / "pictures" / f"{name}.svg").write_bytes(transparent(svg, dark))


if __name__ == "__main__":
    main()
