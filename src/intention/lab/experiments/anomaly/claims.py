"""What the rows of `anomaly` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from intention.lab.core.results import Row, select, student
from intention.lab.experiments.anomaly.model import LABELS, MODELS
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, Claim
from intention.lab.experiments.compare import UNTESTED, Learnt, together, untrained

__all__ = [
    "ASKED",
    "DEPTHS",
    "PRINTED",
    "RULES",
    "SPLITS",
    "Cell",
    "Gap",
    "cell",
    "claims",
    "finding",
    "mean",
    "percent",
    "spread",
]

SPLITS = {"labels": ("unseen", "seen"), "images": ("images",)}  # what is asked for after a split
ASKED = ("unseen", "seen", "images")
JUDGED = {"labels": "unseen", "images": "images"}
WORDS = {"unseen": "unseen classes", "seen": "seen classes", "images": "held-out images of all classes"}
RULE = "its accuracy on the classes of training is at least that of the rule “lowest mean cosine to the others”"
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
    """A difference of accuracies, half of its 95% interval, and the seeds that it is over."""

    mean: float
    half: float
    seeds: int

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
    """Half of the 95% interval of the mean: over all sets, or Student's over seeds where that is wider."""
    over_sets = sum(share * (1 - share) / n for share, n in of.values() if n) / len(of) ** 2
    return max(1.96 * math.sqrt(over_sets), _over_seeds([share for share, _ in of.values()]))


def gap(of: Cell, other: Cell) -> Gap | None:
    """The first minus the second, by seed. None: not the same seeds. Both answer the same sets, which is not used."""
    if not of or set(of) != set(other):
        return None
    both = [(*of[seed], *other[seed]) for seed in sorted(of)]
    apart = [p - q for p, _, q, _ in both]
    over_sets = sum(s * (1 - s) / k for p, n, q, m in both for s, k in ((p, n), (q, m)) if k) / len(both) ** 2
    half = max(1.96 * math.sqrt(over_sets), _over_seeds(apart))
    return Gap(sum(apart) / len(apart), half, len(apart))


def _over_seeds(values: Sequence[float]) -> float:
    """Half of Student's 95% interval of their mean; 0 of a single one, of which nothing is known."""
    n = len(values)
    if n < 2:
        return 0.0
    middle = sum(values) / n
    return student(n - 1) * math.sqrt(sum((value - middle) ** 2 for value in values) / (n - 1) / n)


def verdict(found: Gap | None) -> str:
    """holds: the interval is above 0. does not hold: it is below. Otherwise, and with one seed, it is not decided."""
    if found is None:
        return UNTESTED
    if found.seeds < 2 or abs(found.mean) <= found.half:
        return OPEN
    return HOLDS if found.mean > 0 else NOT


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [claim for split in SPLITS for claim in _of_split(rows, split)]


def _of_split(rows: Sequence[Row], split: str) -> list[Claim]:
    return [
        _depth(rows, split),
        _pairs(
            rows,
            split,
            "Softmaxes help, with Transformers and with Informers",
            (("attention", "linear_attention"), ("sigma_intention", "intention")),
        ),
        _pairs(
            rows,
            split,
            "A slight gain of Informers over Transformers (with softmax, and without)",
            (("sigma_intention", "attention"), ("intention", "linear_attention")),
        ),
        _best_of_all(rows, split),
        _level(rows, split),
        _better_than_rules(rows, split),
    ]


def learnt_by(rows: Sequence[Row], split: str) -> dict[int, Learnt]:
    """By depth: which runs have learnt more than the rule knows, on what they were trained for."""
    asked = SPLITS[split][-1]  # seen classes, or other images of all classes
    rule = cell(rows, "cosine", asked=asked)
    return {
        depth: {
            model: {seed: share >= rule[seed][0] for seed, (share, _) in found.items() if seed in rule}
            for model in MODELS
            if (found := cell(rows, model, depth, asked))
        }
        for depth in DEPTHS
    }


def _depth(rows: Sequence[Row], split: str) -> Claim:
    few, many = DEPTHS
    asked, learnt = JUDGED[split], learnt_by(rows, split)
    cases = {}
    for model in MODELS:
        found = gap(cell(rows, model, many, asked), cell(rows, model, few, asked))
        cases[LABELS[model]] = found, _untrained(learnt, (model,), DEPTHS)
    return _claim(f"All five models benefit from depth ({many} layers against {few})", split, cases)


def _pairs(rows: Sequence[Row], split: str, text: str, pairs: Sequence[tuple[str, str]]) -> Claim:
    asked, learnt = JUDGED[split], learnt_by(rows, split)
    cases = {}
    for own, other in pairs:
        for depth in DEPTHS:
            found = gap(cell(rows, own, depth, asked), cell(rows, other, depth, asked))
            name = f"{LABELS[own]} − {LABELS[other]}, {_depth_of(depth)}"
            cases[name] = found, _untrained(learnt, (own, other), (depth,))
    return _claim(text, split, cases)


def _untrained(learnt: dict[int, Learnt], models: Sequence[str], depths: Sequence[int]) -> bool:
    return any(untrained(learnt[depth], models) for depth in depths)


def _claim(text: str, split: str, cases: dict[str, tuple[Gap | None, bool]]) -> Claim:
    """Points of accuracy; each case with whether a model of it did not learn."""
    words = [f"{name} {found}{' (not learnt)' if missed else ''}" for name, (found, missed) in cases.items() if found]
    measured = f"percentage points on {WORDS[JUDGED[split]]}: {'; '.join(words)}" if words else ""
    judged = [UNTESTED if missed else verdict(found) for found, missed in cases.values()]
    return Claim(f"{text}, split over {split}", "section 5.5, Table 3", measured, together(judged))


def _best_of_all(rows: Sequence[Row], split: str) -> Claim:
    best, asked = ("sigma_intention", DEPTHS[1]), JUDGED[split]
    cells, learnt = _cells(rows, asked), learnt_by(rows, split)
    text = f"σInformer with 4 layers is the best of the ten, split over {split}"
    if best not in cells or len(cells) < len(MODELS) * len(DEPTHS):
        return Claim(text, "Table 3", "", UNTESTED)
    others = {key: found for key, found in cells.items() if key != best}
    rival = max(others, key=lambda key: mean(others[key]))
    found = gap(cells[best], others[rival])
    beside = f"the best other one is {_named(*rival)} with {percent(others[rival])}"
    missed = [_named(model, depth) for model, depth in cells if _untrained(learnt, (model,), (depth,))]
    judged = verdict(found)
    if missed:  # one that did not learn could still be the best; it cannot make the best one worse
        beside += f"; not learnt: {', '.join(missed)}"
        judged = UNTESTED if judged == HOLDS else judged
    return Claim(text, "Table 3", f"{percent(cells[best])} on {WORDS[asked]}; {beside}", judged)


def _level(rows: Sequence[Row], split: str) -> Claim:
    """The printed accuracies, against the best cell."""
    least, asked = min(min(both) for both in PRINTED.values()), JUDGED[split]
    cells = _cells(rows, asked)
    text = f"Accuracies of {least:.1%} and more (read as: the best model reaches that), split over {split}"
    if not cells:
        return Claim(text, "Table 3", "", UNTESTED)
    top = max(cells, key=lambda key: mean(cells[key]))
    off, half = mean(cells[top]) - least, spread(cells[top])
    judged = OPEN if len(cells[top]) < 2 or abs(off) <= half else HOLDS if off > 0 else NOT
    return Claim(text, "Table 3", f"the best is {_named(*top)} with {percent(cells[top])} on {WORDS[asked]}", judged)


def _better_than_rules(rows: Sequence[Row], split: str) -> Claim:
    asked = JUDGED[split]
    cells = _cells(rows, asked)
    rules = {name: found for name in RULES if (found := cell(rows, name, asked=asked))}
    text = f"The best model is better than the rule “lowest mean cosine to the others”, split over {split}"
    if not cells or "cosine" not in rules:
        return Claim(text, OUR_LINE, "", UNTESTED)
    top = max(cells, key=lambda key: mean(cells[key]))
    shown = "; ".join(f"{RULES[name]} {percent(found)}" for name, found in rules.items())
    found = gap(cells[top], rules["cosine"])
    ahead = f" ({found} points against the rule)" if found else ""
    return Claim(text, OUR_LINE, f"{_named(*top)} {percent(cells[top])}{ahead}; {shown}", verdict(found))


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


def finding(rows: Sequence[Row]) -> str:
    """On the first split that there is: the best of ours, the best of all, and a rule that has not learnt."""
    for asked in JUDGED.values():
        cells, rule = _cells(rows, asked), cell(rows, "cosine", asked=asked)
        ours = [key for key in cells if key[0] in ("intention", "sigma_intention")]
        if ours and rule:
            own, top = (max(keys, key=lambda key: mean(cells[key])) for keys in (ours, list(cells)))
            count = min(row.config.get("items", 0) for row in rows)
            best = "the best of all" if own == top else f"the best of all, {_named(*top)}, in {mean(cells[top]):.1%}"
            text = f"Asked which of {count} images does not belong, {_named(*own)} is right in {mean(cells[own]):.1%}"
            return f"{text}, {best}, and a rule without training in {mean(rule):.1%} ({WORDS[asked]})."
    return ""
