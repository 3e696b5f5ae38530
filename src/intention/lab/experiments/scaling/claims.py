"""What the rows of `scaling` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.core.results import Row
from intention.lab.experiments.base import HOLDS, NOT, OPEN, Claim, label
from intention.lab.experiments.compare import PUT_TO_THE_TEST, UNTESTED, Learnt, applicable, tested, together, untrained
from intention.lab.experiments.scaling.sizes import SEEDS, Growth, Need, Needed, growth, in_words, needed

__all__ = ["BASELINES", "claims", "finding"]

BASELINES = ("mlp", "neural_process", "attention")
RULE = "it reaches the threshold at some size in the smallest dimension"


def claims(rows: Sequence[Row]) -> list[Claim]:
    found = needed(rows)
    return [
        Claim(
            "MLP, NP and Attention require exponentially many dimensions wrt. the input dimensionality",
            "section 2, Figure 3",
            *exponential(found, BASELINES),
        ),
        Claim(
            "Intention learns least squares with a smaller latent size than MLP, NP and Attention",
            "Figure 3",
            *smaller(found, "intention", BASELINES),
        ),
        _sigma(found),
    ]


def learnt_by(found: Needed) -> Learnt:
    """Which runs have learnt least squares at all."""
    least = min((d for by_d in found.values() for d in by_d), default=0)
    return {model: {seed: need.reached for seed, need in by_d.get(least, {}).items()} for model, by_d in found.items()}


def _sigma(found: Needed) -> Claim:
    learns, judged = applicable("sigma_intention", learnt_by(found), BASELINES)
    beside, _ = smaller(found, "sigma_intention", BASELINES) if learns else ("", "")
    text = f"{PUT_TO_THE_TEST} (σIntention; read as: {RULE})"
    return Claim(text, "abstract, Figure 3", f"{learns}; {beside}" if learns else "", judged)


def exponential(found: Needed, baselines: Sequence[str]) -> tuple[str, str]:
    """What was measured and the verdict on "exponentially many dimensions", baseline by baseline."""
    fits = {model: growth(found[model]) if model in found else None for model in baselines}
    words = []
    for model in (model for model in baselines if model in found):
        sizes = ", ".join(f"d = {d}: {in_words(needs)}" for d, needs in found[model].items())
        words.append(f"{label(model)} {sizes} ({fits[model] or 'no growth to fit'})")
    if any(fit is not None and fit.dims < 4 for fit in fits.values()):
        words.append("that growth is exponential needs four solved dimensions, and a line in log s")
    return "; ".join(words), together([is_exponential(fit) for fit in fits.values()])


def is_exponential(fit: Growth | None) -> str:
    """holds: four dimensions or more were solved, the size grows with every seed, and a line fits log s better against
    d than against log d. A growth over fewer dimensions leaves it open, as a lower bound that does not grow does.
    """
    if fit is None or fit.factor.count < SEEDS:
        return UNTESTED
    if not fit.grows:
        return OPEN if fit.bound else NOT
    return OPEN if fit.dims < 4 else HOLDS if fit.straight else NOT


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
        answers = [is_smaller(own[seed], best[seed]) for seed in sorted(own)]
        count = f"smaller with {answers.count(True)} of {len(answers)} seeds"
        words.append(f"d = {d}: {in_words(own)}, the best baseline {in_words(best)}, {count}")
        verdicts.append(all_seeds(answers))
    missed = untrained(learnt_by(found), baselines)
    return "; ".join([*words, *filter(None, [missed])]), tested(together(verdicts), missed)


def is_smaller(own: Need, best: Need) -> bool | None:
    """None: not known, since a size was not reached."""
    if own.reached and own.size < best.size:
        return True
    return False if best.reached and own.size >= best.size else None


def all_seeds(answers: Sequence[bool | None]) -> str:
    """Sizes are powers of two, so that an interval says little: all seeds must agree, three of them at least."""
    if len(answers) < SEEDS or len(set(answers)) > 1 or answers[0] is None:
        return OPEN
    return HOLDS if answers[0] else NOT


def finding(rows: Sequence[Row]) -> str:
    """In the largest dimension that Intention solved."""
    found = needed(rows)
    solved = [d for d, needs in found.get("intention", {}).items() if all(need.reached for need in needs.values())]
    others = [found[name][max(solved)] for name in BASELINES if solved and max(solved) in found.get(name, {})]
    if not others:
        return ""
    own = found["intention"][max(solved)]
    best = min(others, key=lambda needs: sorted(need.order for need in needs.values()))
    text = f"To learn least squares in {max(solved)} dimensions Intention needs a latent size of {in_words(own)}"
    return f"{text}, the best other model {in_words(best)}."
