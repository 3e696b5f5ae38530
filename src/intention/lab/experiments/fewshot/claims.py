"""What the rows of `fewshot` say to the paper's claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial

from intention.lab.core.results import Row, estimate
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, Claim, label
from intention.lab.experiments.compare import PUT_TO_THE_TEST, UNTESTED, applicable, together, verdict
from intention.lab.experiments.fewshot.config import HALVES
from intention.lab.experiments.fewshot.judge import (
    ABOVE,
    LEARNT,
    SAME,
    SEEDS,
    Part,
    above,
    against,
    claim,
    each_seed,
    ends,
    judged_on,
    learnt,
    same,
    same_seeds,
    seeds_of,
    set_name,
    sets,
    steps_of,
)

__all__ = ["RECIPES", "claims", "finding", "mean_of"]

BASELINES = ("attention", "neural_process")
ORDER = ("intention", "maml", "neural_process", "attention")
PRINTED = 0.673  # Intention in Table 1
PAPERS = "miniimagenet"  # the data of the paper
TABLE = "section 5.2, Table 1"
RECIPES = {"": "each from scratch", "_tuned": "all from one encoder"}  # ends of models' names


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        *(one for recipe in RECIPES for one in _of_recipe(rows, recipe)),
        _sigma(rows),
        claim(
            rows,
            f"Intention is above LS-SVM on the frozen features of a classifier {ABOVE}",
            OUR_LINE,
            against("intention", ("pretrained",)),
        ),
        claim(
            rows,
            f"Least squares and cross-entropy train Intention equally well {SAME}",
            OUR_LINE,
            against("intention", ("intention_ce",), same),
        ),
        *_printed(rows),
    ]


def _of_recipe(rows: Sequence[Row], recipe: str) -> list[Claim]:
    """What is claimed of models that were trained alike."""
    own, how = f"intention{recipe}", RECIPES[recipe]
    baselines = tuple(f"{model}{recipe}" for model in BASELINES)
    order = " > ".join(label(model) for model in ORDER)
    outperforms = "Intention outperforms all the baselines"
    return [
        claim(
            rows,
            f"{outperforms}: Attention and Neural Process, {how} {ABOVE}",
            TABLE,
            against(own, baselines),
            own,
        ),
        claim(
            rows,
            f"{outperforms}: MAML, {how}, on the seeds it has {ABOVE}",
            TABLE,
            against(own, (f"maml{recipe}",)),
            own,
        ),
        claim(
            rows,
            f"The order is that of the paper: {order}, {how} {ABOVE}",
            TABLE,
            partial(_ordered, recipe=recipe),
            own,
        ),
        claim(
            rows,
            f"Intention is above ProtoNet too, which the paper leaves out, {how} {ABOVE}",
            OUR_LINE,
            against(own, (f"protonet{recipe}",)),
            own,
        ),
    ]


def _sigma(rows: Sequence[Row]) -> Claim:
    model = "sigma_intention_tuned"

    def each(some: list[Row]) -> Part:
        own = judged_on(some, model)
        learns, judged = applicable(model, {model: {seed: learnt({seed: row}) for seed, row in own.items()}})
        return "; ".join(filter(None, (each_seed(model, own) if own else "", learns))), judged

    text = f"{PUT_TO_THE_TEST} (σIntention; read as: its accuracy is at least {LEARNT:g} times that of chance)"
    return claim(rows, text, "abstract, section 6", each, model)


def _printed(rows: Sequence[Row]) -> list[Claim]:
    """The paper's number, where the data are the paper's; the best of our ways to train Intention."""
    some = [row for row in rows if row.config.get("data") == PAPERS]
    models = [model for model in ("intention", "intention_longer", "intention_tuned") if judged_on(some, model)]
    if not models:
        return []
    parts, means = [], {}
    for model in models:
        own, halves = judged_on(some, model), seeds_of(some, model, HALVES)
        means[model] = estimate([row.value for row in own.values()]).mean
        steps = steps_of(next(iter(own.values())).config, model)
        spread = [f"random halves {row.value:.1%} ± {(row.data or {})['spread']:.1%}" for row in halves.values()]
        parts.append(", ".join([f"{each_seed(model, own)} after {steps} steps", *spread]))
    text = f"Intention reaches {PRINTED:.1%} (read as: the best of our ways to train it does, on all unseen classes)"
    measured = f"{set_name(PAPERS)}: {'; '.join(parts)}"
    return [Claim(text, TABLE, measured, _reaches(judged_on(some, max(means, key=lambda model: means[model]))))]


def _reaches(own: dict[int, Row]) -> str:
    """By seeds, or where these are few by the interval of each over its episodes."""
    if len(own) >= SEEDS:
        return verdict(estimate([row.value for row in own.values()]), PRINTED)
    low, high = min(ends(row)[0] for row in own.values()), max(ends(row)[1] for row in own.values())
    return HOLDS if low >= PRINTED else NOT if high < PRINTED else OPEN


def _ordered(some: list[Row], recipe: str) -> Part:
    found = {model: judged_on(some, f"{model}{recipe}") for model in ORDER}
    # MAML has fewer seeds: what stands around it is compared, too
    pairs = [*itertools.pairwise(ORDER), (ORDER[0], ORDER[2])]
    verdicts = []
    for a, b in pairs:
        # one that has not learnt is not below another one either
        trained = learnt({seed: row for seed, row in found[a].items() if row.value is not None})
        judged = above(*same_seeds(found[a], found[b], "maml" if "maml" in (a, b) else b))
        verdicts.append(judged if trained else UNTESTED)
    said = "; ".join(each_seed(f"{model}{recipe}", rows) for model, rows in found.items() if rows)
    each = ", ".join(f"{label(a)} over {label(b)}: {one}" for (a, b), one in zip(pairs, verdicts, strict=True))
    return f"{said}; {each}" if said else "", together(verdicts)


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for data, some in sets(rows).items():
        recipe = next((one for one in RECIPES if judged_on(some, f"intention{one}")), "")
        own = mean_of(some, f"intention{recipe}")
        rivals = {name: mean_of(some, f"{name}{recipe}") for name in (*BASELINES, "maml", "protonet")}
        rivals = {name: mean for name, mean in rivals.items() if not math.isnan(mean)}
        if not math.isnan(own) and rivals:
            best = max(rivals, key=lambda name: rivals[name])
            beside = f"{label(best)}, the best other model, in {rivals[best]:.1%} ({set_name(data)})"
            parts.append(f"in {own:.1%} of cases, {beside}{_beside_the_paper(some) if data == PAPERS else ''}")
    way, shot = ((rows[0].config if rows else {}).get(name, 5) for name in ("way", "shot"))
    text = f"From {shot} images of each of {way} new classes Intention names others right"
    return f"{text} {'; '.join(parts)}." if parts else ""


def _beside_the_paper(some: Sequence[Row]) -> str:
    ways = [mean_of(some, f"intention{one}") for one in ("", "_longer", "_tuned")]
    best = max(mean for mean in ways if not math.isnan(mean))
    return f"; the best of our ways to train it reaches {best:.1%}, the paper prints {PRINTED:.1%}"


def mean_of(rows: Sequence[Row], model: str) -> float:
    """NaN where it was not run."""
    return estimate([row.value for row in judged_on(rows, model).values()]).mean
