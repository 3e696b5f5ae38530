"""What the rows of the few-shot experiments say to the paper's claims.

Few seeds are trained, so a claim is judged seed by seed, by the 95% intervals over the test episodes, which are the
same for all models of a seed.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim, data_name, label
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.fewshot.config import ACCURACY, UNSEEN

BASELINES = ("attention", "neural_process")
ORDER = ("intention", "maml", "neural_process", "attention")
PRINTED = 0.673  # Intention in Table 1
SMALL = (16, 32)  # sizes of e_H
NEAR = 0.01  # a percentage point
ABOVE = "(read as: for every seed the intervals over test episodes lie apart; partly: the mean over seeds is above)"
SAME = (
    "(read as: for every seed the intervals over test episodes overlap or the difference is at most 1 percentage "
    "point; partly: that of the means over seeds is)"
)
ENCODERS = {"conv4": "Conv4", "resnet12": "ResNet-12"}

Seeds = Mapping[int, Row]  # the accuracy of one model
Judge = Callable[[Seeds, Seeds], str]
Part = tuple[str, str]  # what was measured, and the verdict on it


def sets(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each data set, by its name in the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.config.get("data", "")), []).append(row)
    return found


def set_name(data: str) -> str:
    return data_name(data) or "unnamed data"


def seeds_of(rows: Iterable[Row], model: str, metric: str = ACCURACY) -> dict[int, Row]:
    return {row.seed: row for row in sorted(select(rows, model=model, metric=metric), key=lambda row: row.seed)}


def percent(row: Row) -> str:
    """
    >>> percent(Row("fewshot", "a", "quick", {}, "maml", 0, "accuracy", 0.5771, interval=(0.57, 0.5842)))
    '57.7% [57.0, 58.4]'
    """
    if row.value is None:
        return "not finite"
    ends = "" if row.interval is None else f" [{100 * row.interval[0]:.1f}, {100 * row.interval[1]:.1f}]"
    return f"{100 * row.value:.1f}%{ends}"


def trained(rows: Sequence[Row]) -> str:
    """How far, and what: "4000 steps × 2 episodes, Conv4 of width 64"."""
    config = rows[0].config
    encoder = ENCODERS.get(config.get("encoder", ""), "unnamed encoder")
    return f"{config.get('steps')} steps × {config.get('batch')} episodes, {encoder} of width {config.get('width')}"


def steps_of(config: Mapping[str, Any], model: str) -> int:
    """Of this model; one of them is trained longer than the others."""
    own = config.get(model)
    return int(config.get("steps", 0)) * int(own.get("times", 1) if isinstance(own, Mapping) else 1)


def same_seeds(own: Seeds, other: Seeds, model: str) -> tuple[Seeds, Seeds]:
    """Nothing unless both ran with the same seeds. Second-order MAML has fewer: it is compared on those it has."""
    if model == "maml":
        common = set(own) & set(other)
        own, other = ({seed: rows[seed] for seed in common} for rows in (own, other))
    return (own, other) if own and set(own) == set(other) else ({}, {})


def above(own: Seeds, other: Seeds) -> str:
    known = _known(own, other)
    if known is not None:
        return known
    if all(_ends(own[seed])[0] > _ends(other[seed])[1] for seed in own):
        return "holds"
    return "partly" if _mean(own) > _mean(other) else "does not hold"


def same(own: Seeds, other: Seeds) -> str:
    known = _known(own, other)
    if known is not None:
        return known
    if all(_near(own[seed], other[seed]) for seed in own):
        return "holds"
    return "partly" if abs(_mean(own) - _mean(other)) <= NEAR else "does not hold"


def _known(own: Seeds, other: Seeds) -> str | None:
    """The verdict where there is nothing to compare."""
    if not own or any(row.value is None for row in other.values()):
        return UNTESTED
    return "does not hold" if any(row.value is None for row in own.values()) else None


def _near(one: Row, two: Row) -> bool:
    apart = max(_ends(one)[0], _ends(two)[0]) > min(_ends(one)[1], _ends(two)[1])
    return not apart or abs((one.value or 0) - (two.value or 0)) <= NEAR


def _ends(row: Row) -> tuple[float, float]:
    """Without an interval nothing is surely above or below, nor does anything overlap."""
    return (-math.inf, math.inf) if row.interval is None else row.interval


def _mean(rows: Seeds) -> float:
    return statistics.fmean(row.value for row in rows.values() if row.value is not None)


def all_of(verdicts: Sequence[str]) -> str:
    """Of one claim about several models: untested if any of them is missing."""
    return UNTESTED if UNTESTED in verdicts else together(verdicts)


def claims_table_1(rows: Sequence[Row]) -> list[Claim]:
    where = "section 5.2, Table 1"
    order = " > ".join(label(model) for model in ORDER)
    return [
        _claim(
            rows,
            f"Intention outperforms all the baselines: Attention and Neural Process {ABOVE}",
            where,
            _against("intention", BASELINES),
        ),
        _claim(
            rows,
            f"Intention outperforms all the baselines: MAML, on its one seed {ABOVE}",
            where,
            _against("intention", ("maml",)),
        ),
        _claim(rows, f"The order is that of the paper: {order} {ABOVE}", where, _ordered),
        _claim(
            rows,
            f"Intention is above ProtoNet too, which the paper leaves out {ABOVE}",
            "our own line",
            _against("intention", ("protonet",)),
        ),
        _claim(
            rows,
            f"Intention is above LS-SVM on the frozen features of a classifier {ABOVE}",
            "our own line",
            _against("intention", ("pretrained",)),
        ),
        _claim(
            rows,
            f"Least squares and cross-entropy train Intention equally well {SAME}",
            "our own line",
            _against("intention", ("intention_ce",), same),
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
        verdicts += [_ends(row)[1] >= PRINTED for row in own.values()]
        steps = steps_of(next(iter(own.values())).config, model)
        parts.append(f"{_said(model, own)} after {steps} steps (on all 20 unseen classes {_said('', unseen)})")
    text = f"Intention reaches {PRINTED:.1%} (read as: its intervals over test episodes do)"
    verdict = "holds" if all(verdicts) else "partly" if any(verdicts) else "does not hold"
    return [Claim(text, where, f"{set_name('miniimagenet')}: {'; '.join(parts)}", verdict)]


def claims_table_2(rows: Sequence[Row]) -> list[Claim]:
    where = "section 5.2, Table 2"
    text = "Framing Intention as QDA reduces accuracy compared to LS-SVM"
    return [
        _claim(
            rows,
            f"{text}, as printed: one pooled covariance, which is LDA {ABOVE}",
            where,
            _against("intention", ("intention_lda",)),
        ),
        _claim(
            rows,
            f"{text}, with one covariance per class {ABOVE}",
            where,
            _against("intention", ("intention_qda",)),
        ),
        _claim(
            rows,
            f"The kernelised version matches the unkernelised one {SAME}",
            where,
            _against("intention_kernel", ("intention",), same),
        ),
    ]


def claims_latent(rows: Sequence[Row]) -> list[Claim]:
    text = "The kernelised version reaches better performance in a smaller latent size regime"
    where = "section 5.2, Figure 14"
    return [_claim(rows, f"{text}, at {SMALL[0]} and {SMALL[1]} {ABOVE}", where, _small_latents)]


def of_latent(rows: Iterable[Row], latent: int) -> list[Row]:
    return [row for row in rows if (row.data or {}).get("latent") == latent]


def latents(rows: Iterable[Row]) -> list[int]:
    return sorted(
        {int(row.data["latent"]) for row in select(rows, metric=ACCURACY) if row.data and "latent" in row.data}
    )


def _against(model: str, others: Sequence[str], judge: Judge = above) -> Callable[[list[Row]], Part]:
    """The model against each of the others."""

    def each(some: list[Row]) -> Part:
        own, texts, verdicts = seeds_of(some, model), [], []
        for other in others:
            found = seeds_of(some, other)
            verdicts.append(judge(*same_seeds(own, found, other)))
            texts.append(f"{_said(other, found)} ({verdicts[-1] if found else 'not run'})")
        return f"{_said(model, own)}; against {'; '.join(texts)}" if own else "", all_of(verdicts)

    return each


def _ordered(some: list[Row]) -> Part:
    found = {model: seeds_of(some, model) for model in ORDER}
    # MAML has fewer seeds: what stands around it is compared, too
    pairs = [*itertools.pairwise(ORDER), (ORDER[0], ORDER[2])]
    verdicts = [above(*same_seeds(found[a], found[b], "maml" if "maml" in (a, b) else b)) for a, b in pairs]
    said = "; ".join(_said(model, rows) for model, rows in found.items() if rows)
    each = ", ".join(f"{label(a)} over {label(b)}: {verdict}" for (a, b), verdict in zip(pairs, verdicts, strict=True))
    return f"{said}; {each}" if said else "", all_of(verdicts)


def _small_latents(some: list[Row]) -> Part:
    texts, verdicts = [], dict.fromkeys(SMALL, UNTESTED)
    for latent in sorted({*latents(some), *SMALL}):
        here = of_latent(some, latent)
        kernel, linear = (seeds_of(here, model) for model in ("intention_kernel", "intention"))
        verdict = above(*same_seeds(kernel, linear, "intention"))
        if latent in SMALL:
            verdicts[latent] = verdict
        if kernel and linear:
            both = f"{_said('intention_kernel', kernel)}, {_said('intention', linear)}"
            texts.append(f"at {latent}: {both} ({verdict})")
    return "; ".join(texts), all_of(list(verdicts.values()))


def _said(model: str, rows: Seeds) -> str:
    """The accuracy of each seed."""
    return f"{label(model)} {' and '.join(percent(row) for row in rows.values())}".strip()


def _claim(rows: Sequence[Row], text: str, where: str, each: Callable[[list[Row]], Part]) -> Claim:
    """One claim for all data sets there are."""
    parts = [(data, some, *each(some)) for data, some in sets(rows).items()]
    measured = ". ".join(f"{set_name(data)}, {trained(some)}: {said}" for data, some, said, _ in parts if said)
    return Claim(text, where, measured, together([verdict for *_, verdict in parts]))
