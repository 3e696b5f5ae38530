"""What the rows of `tables` say: errors on tables by the number of rows seen, beside ridge, nearest rows, attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments.base import OUR_LINE, Claim
from intention.lab.experiments.compare import (
    Learnt,
    at_most,
    by_model,
    errors,
    learnt,
    named,
    ratio,
    tested,
    times,
    together,
    untrained,
    verdict,
)

__all__ = ["ERROR", "cases", "claims", "finding"]

ERROR = "error on a table"
LEVEL = 1.05  # times: at least as well
SHOWN = ("diabetes", 100)  # of the finding


def cases(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """The rows of each table and number of rows seen."""
    found: dict[tuple[str, int], list[Row]] = {}
    for row in select(rows, metric=ERROR):
        found.setdefault((str((row.data or {}).get("table")), int(row.x or 0)), []).append(row)
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    level = f"(read as: at most {LEVEL:g} times its error, for every number of rows)"
    return [
        _against(
            rows,
            "ridge_loo",
            f"Trained on made-up tasks alone, Intention answers tables at least as well as ridge {level}",
            LEVEL,
        ),
        _against(rows, "attention", "Trained so, Intention answers tables better than attention of the same size", 1.0),
        _against(rows, "nearest_rows", "Trained so, Intention answers tables better than nearest rows", 1.0),
    ]


def learnt_by(rows: Sequence[Row]) -> Learnt:
    """On made-up tasks."""
    found = by_model(select(rows, metric="mse"))
    return {model: learnt(own, found.get("zero", {})) for model, own in found.items() if model != "zero"}


def _against(rows: Sequence[Row], other: str, text: str, bound: float) -> Claim:
    missed = untrained(learnt_by(rows), [other] if other == "attention" else [])
    parts, verdicts = [], []
    for (name, count), some in cases(rows).items():
        found = by_model(some)
        more = ratio(found.get("intention", {}), found.get(other, {}))
        if bound > 1:
            judged = at_most(more, bound)
        else:
            judged = verdict(ratio(found.get(other, {}), found.get("intention", {})), 1.0)
        verdicts.append(tested(judged, missed))
        if more is not None:
            parts.append(f"{name}, {count} rows: {times(more)}× ({errors(found, ('intention', other))})")
    said = f"its error over that of {named(other)}: {'; '.join(parts)}" if parts else ""
    return Claim(text, OUR_LINE, ", ".join(filter(None, (said, missed))), together(verdicts))


def finding(rows: Sequence[Row]) -> str:
    found = by_model(cases(rows).get(SHOWN, []))
    means = {model: estimate_log(list(own.values())).mean for model, own in found.items()}
    known = [model for model in means if math.isfinite(means[model])]
    parts = [f"{named(model)} {means[model]:.3g}" for model in sorted(known, key=lambda model: means[model])]
    if not parts:
        return ""
    name, count = SHOWN
    return f"From {count} rows of a table never seen ({name}), the share of variance missed: {', '.join(parts)}."
