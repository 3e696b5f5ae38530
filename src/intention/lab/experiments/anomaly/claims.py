"""What the rows of `anomaly` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from intention.lab.core.results import Row, select
from intention.lab.experiments.anomaly.model import LABELS, MODELS
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import UNTESTED, together

ASKED = ("unseen", "seen")
DEPTHS = (1, 4)  # of Table 3
PRINTED = {  # Table 3
    "neural_process": (0.939, 0.940),
    "linear_attention": (0.944, 0.944),
    "intention": (0.941, 0.951),
    "attention": (0.943, 0.953),
    "sigma_intention": (0.953, 0.955),
}
RULES = {
    "cosine": "lowest mean cosine to the others",
    "nearest": "lowest cosine to the nearest of the others",
    "whitened": "lowest mean cosine after half-whitening",
    "chance": "chance",
}

Cell = dict[int, tuple[float, int]]  # seed -> share of the sets, number of sets


class Gap(NamedTuple):
    """A difference of accuracies, and half of its 95% interval."""

    mean: float
    half: float

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half:.1f}"


def cell(rows: Sequence[Row], model: str, layers: int = 0, asked: str = "unseen", recipe: str = "ours") -> Cell:
    """The runs of one cell of the table; rules have 0 layers."""
    found: Cell = {}
    for row in select(rows, metric="accuracy", model=model):
        about = row.data or {}
        own = layers == 0 or (about.get("layers"), about.get("recipe")) == (layers, recipe)
        if own and about.get("asked") == asked and row.value is not None:
            found[row.seed] = row.value, int(about.get("sets", 0))
    return found


def mean(of: Cell) -> float:
    return sum(share for share, _ in of.values()) / len(of)


def spread(of: Cell) -> float:
    """Half of the 95% interval of the mean: over all sets, or over seeds where these differ by more."""
    over_sets = sum(share * (1 - share) / n for share, n in of.values() if n) / len(of) ** 2
    return 1.96 * math.sqrt(max(over_sets, _over_seeds([share for share, _ in of.values()])))


def gap(of: Cell, other: Cell) -> Gap | None:
    """The first minus the second, by seed. None: not the same seeds. Both answer the same sets, which is not used."""
    if not of or set(of) != set(other):
        return None
    both = [(*of[seed], *other[seed]) for seed in sorted(of)]
    apart = [p - q for p, _, q, _ in both]
    over_sets = sum(s * (1 - s) / k for p, n, q, m in both for s, k in ((p, n), (q, m)) if k) / len(both) ** 2
    half = 1.96 * math.sqrt(max(over_sets, _over_seeds(apart)))
    return Gap(sum(apart) / len(apart), half)


def _over_seeds(values: Sequence[float]) -> float:
    """The variance of their mean; 0 of a single one, of which nothing is known."""
    n = len(values)
    middle = sum(values) / n
    return sum((value - middle) ** 2 for value in values) / (n - 1) / n if n > 1 else 0.0


def verdict(found: Gap | None) -> str:
    """holds: the interval is above 0. partly: it holds 0. does not hold: it is below."""
    if found is None:
        return UNTESTED
    if found.mean > found.half:
        return "holds"
    return "does not hold" if found.mean < -found.half else "partly"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _depth(rows),
        _pairs(
            rows,
            "Softmaxes help, with Transformers and with Informers",
            (("attention", "linear_attention"), ("sigma_intention", "intention")),
        ),
        _pairs(
            rows,
            "A slight gain of Informers over Transformers (with softmax, and without)",
            (("sigma_intention", "attention"), ("intention", "linear_attention")),
        ),
        _best_of_all(rows),
        _level(rows),
        _better_than_rules(rows),
    ]


def _depth(rows: Sequence[Row]) -> Claim:
    few, many = DEPTHS
    gaps = {LABELS[model]: gap(cell(rows, model, many), cell(rows, model, few)) for model in MODELS}
    return _claim(f"All five models benefit from depth ({many} layers against {few})", "section 5.5, Table 3", gaps)


def _pairs(rows: Sequence[Row], text: str, pairs: Sequence[tuple[str, str]]) -> Claim:
    gaps = {
        f"{LABELS[own]} − {LABELS[other]}, {_depth_of(depth)}": gap(cell(rows, own, depth), cell(rows, other, depth))
        for own, other in pairs
        for depth in DEPTHS
    }
    return _claim(text, "section 5.5, Table 3", gaps)


def _claim(text: str, where: str, gaps: dict[str, Gap | None]) -> Claim:
    """Points of accuracy on unseen classes."""
    shown = "; ".join(f"{name} {found}" for name, found in gaps.items() if found)
    measured = f"percentage points on unseen classes: {shown}" if shown else ""
    return Claim(text, where, measured, together([verdict(found) for found in gaps.values()]))


def _best_of_all(rows: Sequence[Row]) -> Claim:
    own = cell(rows, "sigma_intention", DEPTHS[1])
    cells = _cells(rows)
    others = {key: found for key, found in cells.items() if key != ("sigma_intention", DEPTHS[1])}
    text = "σInformer with 4 layers is the best of the ten"
    if not own or len(cells) < len(MODELS) * len(DEPTHS):
        return Claim(text, "Table 3", "", UNTESTED)
    rival = max(others, key=lambda key: mean(others[key]))
    found = gap(own, others[rival])
    measured = f"{percent(own)} on unseen classes; the best other one is {_named(*rival)} with {percent(others[rival])}"
    return Claim(text, "Table 3", measured, verdict(found))


def _level(rows: Sequence[Row]) -> Claim:
    """The printed accuracies, against the best cell of each kind of question."""
    least = min(min(both) for both in PRINTED.values())
    parts, verdicts = [], []
    for asked in ASKED:
        cells = _cells(rows, asked)
        if cells:
            top = max(cells, key=lambda key: mean(cells[key]))
            parts.append(f"the best on {asked} classes is {_named(*top)} with {percent(cells[top])}")
            verdicts.append("holds" if mean(cells[top]) >= least else "does not hold")
    text = f"Accuracies of {least:.1%} and more (read as: the best model reaches that)"
    return Claim(text, "Table 3", "; ".join(parts), together(verdicts))


def _better_than_rules(rows: Sequence[Row]) -> Claim:
    cells = _cells(rows)
    rules = {name: found for name in RULES if (found := cell(rows, name))}
    text = "On unseen classes the best model is better than the rule “lowest mean cosine to the others”"
    if not cells or "cosine" not in rules:
        return Claim(text, "our own line", "", UNTESTED)
    top = max(cells, key=lambda key: mean(cells[key]))
    shown = "; ".join(f"{RULES[name]} {percent(found)}" for name, found in rules.items())
    found = gap(cells[top], rules["cosine"])
    ahead = f" ({found} points against the rule)" if found else ""
    measured = f"{_named(*top)} {percent(cells[top])}{ahead}; {shown}"
    return Claim(text, "our own line", measured, verdict(found))


def _cells(rows: Sequence[Row], asked: str = "unseen") -> dict[tuple[str, int], Cell]:
    """All cells that there are."""
    keys = [(model, depth) for model in MODELS for depth in DEPTHS]
    return {key: found for key in keys if (found := cell(rows, *key, asked))}


def _named(model: str, depth: int) -> str:
    return f"{LABELS[model]} ({_depth_of(depth)})"


def _depth_of(depth: int) -> str:
    return "1 layer" if depth == 1 else f"{depth} layers"


def percent(of: Cell) -> str:
    return f"{100 * mean(of):.1f} ± {100 * spread(of):.1f}%"
