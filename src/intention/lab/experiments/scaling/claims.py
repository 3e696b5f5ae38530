"""What the rows of `scaling` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from intention.lab.core.results import Estimate, Row, estimate_log
from intention.lab.experiments.base import Claim, label
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.scaling.sizes import SEEDS, Growth, Need, Needed, growth, in_words, needed, over_seeds

BASELINES = ("mlp", "neural_process", "attention")


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = needed(rows)
    needs = "{} learns least squares with a smaller latent size than MLP, NP and Attention"
    return [
        Claim(
            "MLP, NP and Attention require exponentially many dimensions wrt. the input dimensionality",
            "section 2, Figure 3",
            *exponential(found, BASELINES),
        ),
        Claim(needs.format("Intention"), "Figure 3", *smaller(found, "intention", BASELINES)),
        Claim(
            needs.format("σIntention") + " (both new modules are put to the test)",
            "abstract",
            *smaller(found, "sigma_intention", BASELINES),
        ),
    ]


def exponential(found: Needed, baselines: Sequence[str]) -> tuple[str, str]:
    """What was measured and the verdict on "exponentially many dimensions".

    holds: exponential for all. partly: growing for all. does not hold: one was fitted, and its growth is not sure. A
    baseline that is missing, has too few seeds or nothing to fit makes it not tested, as does a growth that is not sure
    and a lower bound only.
    """
    fits = {model: growth(found[model]) for model in baselines if model in found}
    words = []
    for model, fit in fits.items():
        sizes = ", ".join(f"d = {d}: {in_words(needs)}" for d, needs in found[model].items())
        words.append(f"{label(model)} {sizes} ({fit or 'no growth to fit'})")
    known = [fit for fit in fits.values() if fit is not None and fit.factor.count >= SEEDS]
    if len(known) < len(baselines):
        unfit = [label(model) for model in baselines if (fit := fits.get(model)) is None or fit.factor.count < SEEDS]
        words.append(f"all of them must have a growth over {SEEDS} seeds or more: not so {', '.join(unfit)}")
        return "; ".join(words), UNTESTED
    if all(_is_exponential(fit) for fit in known):
        return "; ".join(words), "holds"
    if all(fit.grows for fit in known):
        words.append("all grow; that it is exponential needs four solved dimensions of each, and a line in log s")
        return "; ".join(words), "partly"
    refuted = any(not fit.grows and not fit.bound for fit in known)
    return "; ".join(words), "does not hold" if refuted else UNTESTED


def _is_exponential(fit: Growth) -> bool:
    return fit.dims >= 4 and fit.grows and fit.straight


def smaller(found: Needed, model: str, baselines: Sequence[str]) -> tuple[str, str]:
    """What was measured and the verdict on "needs a smaller size than the baselines", per dimension, paired by seed."""
    if any(name not in found for name in (model, *baselines)):
        return "not all of the models were trained", UNTESTED
    words, verdicts = [], []
    for d in sorted({d for name in (model, *baselines) for d in found[name]}):
        own, others = found[model].get(d, {}), [found[other].get(d, {}) for other in baselines]
        if not own or any(set(needs) != set(own) for needs in others):
            words.append(f"d = {d}: not the same seeds of all")
            verdicts.append(UNTESTED)
            continue
        best = {seed: min((needs[seed] for needs in others), key=lambda need: need.order) for seed in own}
        factor = _factor(own, best)
        text = f"d = {d}: {in_words(own)}, the best baseline {in_words(best)}"
        bound = "" if all(need.reached for need in best.values()) else "≥ "
        words.append(text if factor is None else f"{text}, × {bound}{over_seeds(factor)}")
        verdicts.append(_above_one(factor))
    return "; ".join(words), together(verdicts)


def _factor(own: Mapping[int, Need], best: Mapping[int, Need]) -> Estimate | None:
    """How many times its size the best baseline needs; None if its own is not known."""
    if not all(need.reached for need in own.values()):
        return None
    return estimate_log([best[seed].size / own[seed].size for seed in own])


def _above_one(factor: Estimate | None) -> str:
    if factor is None or not factor.mean > 1:
        return "does not hold"
    return "holds" if factor.low > 1 and factor.count >= SEEDS else "partly"
