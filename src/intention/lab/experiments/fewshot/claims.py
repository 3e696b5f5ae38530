"""What the rows of `fewshot` say to the paper's claims."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from intention.lab.core.results import Row
from intention.lab.experiments.base import Claim, label
from intention.lab.experiments.fewshot.config import UNSEEN
from intention.lab.experiments.fewshot.judge import (
    ABOVE,
    SAME,
    Part,
    above,
    against,
    all_of,
    claim,
    each_seed,
    ends,
    same,
    same_seeds,
    seeds_of,
    set_name,
    steps_of,
)

BASELINES = ("attention", "neural_process")
ORDER = ("intention", "maml", "neural_process", "attention")
PRINTED = 0.673  # Intention in Table 1


def claims(rows: Sequence[Row]) -> list[Claim]:
    where = "section 5.2, Table 1"
    order = " > ".join(label(model) for model in ORDER)
    return [
        claim(
            rows,
            f"Intention outperforms all the baselines: Attention and Neural Process {ABOVE}",
            where,
            against("intention", BASELINES),
        ),
        claim(
            rows,
            f"Intention outperforms all the baselines: MAML, on its one seed {ABOVE}",
            where,
            against("intention", ("maml",)),
        ),
        claim(rows, f"The order is that of the paper: {order} {ABOVE}", where, _ordered),
        claim(
            rows,
            f"Intention is above ProtoNet too, which the paper leaves out {ABOVE}",
            "our own line",
            against("intention", ("protonet",)),
        ),
        claim(
            rows,
            f"Intention is above LS-SVM on the frozen features of a classifier {ABOVE}",
            "our own line",
            against("intention", ("pretrained",)),
        ),
        claim(
            rows,
            f"Least squares and cross-entropy train Intention equally well {SAME}",
            "our own line",
            against("intention", ("intention_ce",), same),
        ),
        *_printed(rows, where),
    ]


def _printed(rows: Sequence[Row], where: str) -> list[Claim]:
    """The paper's number, where the data are the paper's."""
    some = [row for row in rows if row.config.get("data") == "miniimagenet"]
    models = [model for model in ("intention", "intention_longer") if seeds_of(some, model)]
    if not models:
        return []
    parts, verdicts = [], []
    for model in models:
        own, unseen = seeds_of(some, model), seeds_of(some, model, UNSEEN)
        verdicts += [ends(row)[1] >= PRINTED for row in own.values()]
        steps = steps_of(next(iter(own.values())).config, model)
        parts.append(f"{each_seed(model, own)} after {steps} steps (on all 20 unseen classes {each_seed('', unseen)})")
    text = f"Intention reaches {PRINTED:.1%} (read as: its intervals over test episodes do)"
    verdict = "holds" if all(verdicts) else "partly" if any(verdicts) else "does not hold"
    return [Claim(text, where, f"{set_name('miniimagenet')}: {'; '.join(parts)}", verdict)]


def _ordered(some: list[Row]) -> Part:
    found = {model: seeds_of(some, model) for model in ORDER}
    # MAML has fewer seeds: what stands around it is compared, too
    pairs = [*itertools.pairwise(ORDER), (ORDER[0], ORDER[2])]
    verdicts = [above(*same_seeds(found[a], found[b], "maml" if "maml" in (a, b) else b)) for a, b in pairs]
    said = "; ".join(each_seed(model, rows) for model, rows in found.items() if rows)
    each = ", ".join(f"{label(a)} over {label(b)}: {verdict}" for (a, b), verdict in zip(pairs, verdicts, strict=True))
    return f"{said}; {each}" if said else "", all_of(verdicts)
