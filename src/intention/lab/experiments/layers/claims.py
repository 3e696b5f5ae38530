"""What the rows of `layers` say to the paper's claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, estimate, estimate_log, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, Claim
from intention.lab.experiments.compare import UNTESTED, at_most, together, verdict

__all__ = ["MODELS", "NAMES", "claims", "finding", "layers_at", "over_seeds"]

NAMES = {
    "step_l": "step 1/L",
    "step_l_mu": "step 2/(L + μ)",
    "chebyshev": "Chebyshev steps",
    "learned": "learned steps",
    "intention": "Intention",
}
GROWS = 0.1  # the least power of kappa that counts as growth
MODELS = ("step_l", "step_l_mu", "chebyshev", "learned", "intention")


def over_seeds(rows: Sequence[Row], model: str, metric: str, kappa: float) -> Estimate:
    return estimate([row.value for row in select(rows, model=model, metric=metric, x=kappa)])


def layers_at(rows: Sequence[Row], model: str, kappa: float, metric: str = "layers") -> tuple[Estimate, int | None]:
    """Measured on random problems, and the worst case in whole layers."""
    worst = over_seeds(rows, model, f"{metric}, worst case", kappa).mean
    return over_seeds(rows, model, metric, kappa), math.ceil(worst - 1e-9) if math.isfinite(worst) else None


def _listed(rows: Sequence[Row], models: Sequence[str], kappa: float, metric: str = "layers") -> str:
    parts = []
    for model in models:
        measured, worst = layers_at(rows, model, kappa, metric)
        if worst is not None:
            known = math.isfinite(measured.mean)
            bound = "" if model in ("learned", "intention") else f"worst case {worst}, "
            parts.append(f"{NAMES[model]}: {bound}random problems {measured if known else 'not reached'}")
    return "; ".join(parts)


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [_example(rows), _one_step(rows), _perfect(rows), _minimum(rows), _growth(rows)]


def _example(rows: Sequence[Row]) -> Claim:
    text = "condition number 10, d = 1000: roughly 6 × 4 = 24 stacked layers to reduce the error to merely 0.1"
    _, printed = layers_at(rows, "step_l", 10.0)
    _, best = layers_at(rows, "step_l_mu", 10.0)
    counts = [UNTESTED if count is None else HOLDS if abs(count - 24) <= 2 else NOT for count in (printed, best)]
    text += " (with the stated step 1/L, and with 2/(L + μ); the worst case, read as: 22 to 26)"
    return Claim(text, "section 2", _listed(rows, MODELS, 10.0), together(counts))


def _one_step(rows: Sequence[Row]) -> Claim:
    text = "to reduce it by 0.1 we would need just one step if the conditioning number was 1.1"
    found = [layers_at(rows, model, 1.1, "layers to a tenth") for model in ("step_l", "step_l_mu")]
    tested = all(worst is not None and math.isfinite(measured.mean) for measured, worst in found)
    verdicts = [
        NOT if measured.mean != 1 or worst != 1 else HOLDS if measured.count > 1 else OPEN for measured, worst in found
    ]
    measured = "to a tenth of the gap: " + _listed(rows, ("step_l", "step_l_mu"), 1.1, "layers to a tenth")
    measured += ". To 0.1 from d = 1000: " + _listed(rows, ("step_l", "step_l_mu"), 1.1)
    return Claim(text, "section 2", measured if tested else "", together(verdicts) if tested else UNTESTED)


def _perfect(rows: Sequence[Row]) -> Claim:
    """Not perfect: the best constant step needs fewer layers at every kappa >= 2, paired by seed.

    Below 2 both need so few layers that there is nothing to compare.
    """
    text = "this is all assuming perfect selection of learning rate (exactly one over the Lipschitz constant)"
    text += "; compared at κ ≥ 2"
    ratios: dict[str, dict[float, Estimate]] = {"step_l_mu": {}, "learned": {}}
    for model, found in ratios.items():
        for kappa in sorted({row.x for row in rows if row.x is not None}):
            base = {row.seed: row.value for row in select(rows, model="step_l", metric="layers", x=kappa)}
            other = {row.seed: row.value for row in select(rows, model=model, metric="layers", x=kappa)}
            if kappa >= 2 and base and set(base) == set(other):
                found[kappa] = estimate_log([_ratio(a, other[seed]) for seed, a in base.items()])
    parts = [
        f"1/L needs {value} times the layers of {NAMES[model]} at κ = {kappa:g}"
        for model, found in ratios.items()
        for kappa, value in [*found.items()][-1:]
    ]
    judged = together([at_most(value, 1) for value in ratios["step_l_mu"].values()])
    return Claim(text, "section 2", "; ".join(parts), judged)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def _minimum(rows: Sequence[Row]) -> Claim:
    text = (
        "Intention is Attention behaviour in the limit, directly computing the minimum rather than doing so iteratively"
    )
    found = select(rows, model="intention", metric="gap left")
    if not found:
        return Claim(text, "section 2", "", UNTESTED)
    most = max(math.inf if row.value is None else row.value for row in found)  # of all kappas and seeds
    widest = max(row.x or 0 for row in found)
    measured = f"one layer of Intention leaves at most {most:.1g} of the gap (κ up to {widest:g}, float64)"
    sure = len({row.seed for row in found}) > 1
    return Claim(text, "section 2", measured, NOT if most >= 1e-20 else HOLDS if sure else OPEN)


def _growth(rows: Sequence[Row]) -> Claim:
    """The power of kappa with which the number of layers grows, from kappa >= 5."""
    text = "its exact speed depends on the conditioning number"
    parts, grows = [], []
    for model in MODELS[:-1]:
        powers = []
        for seed in sorted({row.seed for row in select(rows, model=model)}):
            found = select(rows, model=model, metric="layers", seed=seed)
            pairs = [(math.log(row.x), math.log(row.value)) for row in found if row.value and row.x and row.x >= 5]
            if len(pairs) > 1:
                powers.append(statistics.linear_regression(*zip(*pairs, strict=True)).slope)
        if powers:
            power = estimate(powers)
            parts.append(f"{NAMES[model]}: layers grow as κ to the power {power}")
            grows.append(verdict(power, GROWS))
    return Claim(text, "section 2", "; ".join(parts), together(grows))


def finding(rows: Sequence[Row]) -> str:
    kappa = 10.0 if select(rows, x=10.0) else max((row.x for row in rows if row.x is not None), default=math.nan)
    many, one = (over_seeds(rows, model, "layers", kappa).mean for model in ("step_l", "intention"))
    if math.isnan(many + one):
        return ""
    goal = rows[0].config.get("goal", 0.1)
    text = f"At condition number {kappa:g}, {many:.0f} layers of linear attention, each a step of gradient descent,"
    return f"{text} bring the error down to {goal:g}; Intention needs {one:.0f}."
