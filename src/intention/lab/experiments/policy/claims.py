"""What the rows of `policy` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    LEARNT,
    PUT_TO_THE_TEST,
    UNTESTED,
    Found,
    Learnt,
    applicable,
    beside,
    best,
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
from intention.lab.experiments.policy.task import REWARDS

__all__ = ["claims", "final", "finding", "of_reward"]

BASELINES = ("attention", "neural_process", "mlp")
CLEAR = 4.0  # times: clearly better
RULE = f"its error is at most {LEARNT:g} of that of predicting the mean"


def final(rows: Sequence[Row], reward: str) -> list[Row]:
    return of_reward(select(rows, metric="mse"), reward)


def of_reward(rows: Sequence[Row], reward: str) -> list[Row]:
    return [row for row in rows if (row.data or {}).get("reward") == reward]


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {reward: by_model(final(rows, reward)) for reward in REWARDS}
    cases = {reward: found for reward, found in cases.items() if found}
    only = [_only(reward, found) for reward, found in cases.items()]
    text = "Intention is the only model that shows significant improvement on the task"
    better = "Intention predicts the target better than MLP, Neural Process and Attention"
    return [
        Claim(text, "section 5.3, Figure 9", _text(only), together([each for _, each in only])),
        _against_baselines(
            cases, "intention", f"{better} (read as: at most 1/{CLEAR:g} of the best one's error)", CLEAR
        ),
        _sigma(cases),
        _against_intention(cases),
        _no_training(cases),
    ]


def _only(reward: str, found: Found) -> tuple[str, str]:
    """Who is better than always predicting the mean, with the interval over seeds wholly on that side?

    All four models are needed, with two seeds or more. Where a baseline is not finite nobody knows what it would have
    been, so that Intention cannot be the only one.
    """
    models = ("intention", *BASELINES)
    gains = {model: ratio(found.get("zero", {}), found.get(model, {})) for model in models}
    known = {model: gain for model, gain in gains.items() if gain is not None and gain.count > 1}
    if len(known) < len(models):
        return "", UNTESTED
    better = [model for model, gain in known.items() if verdict(gain, 1) == "holds"]
    measured = (
        f"{reward} reward: MSE {errors(found, (*models, 'zero'))}; better than the mean with an interval below it: "
    )
    unknown = any(math.isnan(known[model].mean) for model in BASELINES)
    each = "does not hold" if better != ["intention"] else UNTESTED if unknown else "holds"
    return measured + (", ".join(map(named, better)) or "none"), each


def learnt_by(found: Found) -> Learnt:
    return {model: learnt(own, found.get("zero", {})) for model, own in found.items() if model != "zero"}


def _against_baselines(cases: dict[str, Found], model: str, text: str, least: float) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = [_case(reward, found, model, least) for reward, found in cases.items()]
    return Claim(text, "section 5.3, Figure 9", _text(parts), together([each for _, each in parts]))


def _case(reward: str, found: Found, model: str, least: float) -> tuple[str, str]:
    ahead, missed = ratio(best(found, BASELINES), found.get(model, {})), untrained(learnt_by(found), BASELINES)
    beside = errors(found, (model, *BASELINES))
    measured = ahead and f"{reward} reward: the best baseline has {times(ahead)} times its MSE ({beside})"
    text = ", ".join(filter(None, (measured, missed)))
    return text if measured else "", tested(verdict(ahead, least), missed)


def _sigma(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        learns, judged = applicable("sigma_intention", learnt_by(found), BASELINES)
        beside, _ = _case(reward, found, "sigma_intention", 1)
        parts.append((f"{reward} reward: {learns}; {beside}" if learns else "", judged))
    text = f"{PUT_TO_THE_TEST} (σIntention; read as: it learns, {RULE})"
    return Claim(text, "abstract, Figure 9", _text(parts), together([each for _, each in parts]))


def _against_intention(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        ahead = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = ahead and f"{reward} reward: linear attention has {times(ahead)} times the MSE of Intention"
        missed = untrained(learnt_by(found), ["linear_attention"])
        parts.append((", ".join(filter(None, (measured, missed))), tested(verdict(ahead, 1), missed)))
    text = "The covariance matters: without it (linear attention, the same layers) the error is larger"
    return Claim(text, "theorem 2.8, our own line", _text(parts), together([each for _, each in parts]))


def _no_training(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        worst = max(found.get("intention_exact", {}).values(), default=None)
        measured = "" if worst is None else f"{reward} reward: largest MSE of a seed {worst:.1g}"
        parts.append((measured, UNTESTED if worst is None else "holds" if worst < 1e-6 else "does not hold"))
    text = "Intention with an intercept on (x, d − ‖x‖²) finds the target without training"
    return Claim(text, "our own line", _text(parts), together([each for _, each in parts]))


def _text(parts: Sequence[tuple[str, str]]) -> str:
    return "; ".join(measured for measured, _ in parts if measured)


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for reward in REWARDS:
        found = by_model(final(rows, reward))
        if said := beside(found, "intention", BASELINES, learnt_by(found)):
            parts.append(f"with {said} ({reward} reward)")
    count = min((row.config.get("points", 0) for row in rows), default=0)
    text = f"From {count} places and their rewards Intention tells where the goal is"
    return f"{text} {'; '.join(parts)}." if parts else ""
