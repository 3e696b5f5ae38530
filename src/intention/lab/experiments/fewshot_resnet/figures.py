"""The tables and drawings of `fewshot_resnet`."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.core.results import Row
from intention.lab.experiments.base import Plot
from intention.lab.experiments.fewshot.figures import tables

__all__ = ["plot"]

TABLE_2 = {"intention": "70.05 ± 0.51", "intention_kernel": "70.43 ± 0.52", "intention_lda": "66.27 ± 5.81 (no target)"}
NOTE_2 = "The paper's ± 5.81 of “QDA” cannot be a 95% interval of 1000 episodes."


def plot(rows: Sequence[Row]) -> list[Plot]:
    return tables(rows, "Table 2", TABLE_2, NOTE_2)
