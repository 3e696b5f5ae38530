"""Reproduce one figure and change it. With text and pictures: docs/tutorials/figure.md"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

from intention.lab import experiments, results
from intention.lab.cli import main

experiment = experiments.find("normalisation")
print(experiment.TITLE, "·", experiment.PLACE)
print(experiment.PRESETS["quick"])

# As it is, smaller
folder = Path(tempfile.mkdtemp())
flags = ["--draws", "600", "--sizes", "16", "32", "--dimensions", "1", "2", "4", "8", "16", "32", "64", "128"]
code = main(["run", "normalisation", "--out", str(folder / "paper"), "--no-tensorboard", *flags])


def show(rows: list[results.Row]) -> None:
    """The first figure of the experiment, as the report has it."""
    draw = next(plot.draw for plot in experiment.plot(rows) if plot.draw)
    draw().savefig(folder / "figure.png", dpi=130)
    plt.figure(figsize=(7, 7.8))
    plt.imshow(plt.imread(folder / "figure.png"))
    plt.axis("off")
    plt.show()


show(results.read_folder(folder / "paper"))

# Changed
flags = ["--draws", "600", "--sizes", "24", "--near", "1", "2", "3"]
code = main(["run", "normalisation", "--out", str(folder / "mine"), "--no-tensorboard", *flags])
rows = results.read_folder(folder / "mine")
show(rows)

# What the claims say of these rows
for claim in experiment.claims(rows)[:2]:
    print(f"{claim.verdict}: {claim.text}")
    print(f"    {claim.measured[:160]}")
