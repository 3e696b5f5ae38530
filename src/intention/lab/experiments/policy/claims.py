"""What the rows of `policy` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    UNTESTED,
    Found,
    best,
    by_margin,
    by_model,
    errors,
    named,
    ratio,
    times,
    together,
    verdict,
)
from intention.lab.experiments.policy.task import REWARDS

BASELINES = ("attention", "neural_process", "mlp")
CLEAR = 4.0  # times: clearly better


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
    sigma = "Both new modules are put to the test: σIntention beats the baselines"
    return [
        Claim(text, "section 5.3, Figure 9", _text(only), together([each for _, each in only])),
        _against_baselines(
            cases, "intention", f"{better} (read as: at most 1/{CLEAR:g} of the best one's error)", CLEAR
        ),
        _against_baselines(cases, "sigma_intention", sigma, 1),
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
    tested = {model: gain for model, gain in gains.items() if gain is not None and gain.count > 1}
    if len(tested) < len(models):
        return "", UNTESTED
    better = [model for model, gain in tested.items() if verdict(gain, 1) == "holds"]
    measured = (
        f"{reward} reward: MSE {errors(found, (*models, 'zero'))}; better than the mean with an interval below it: "
    )
    unknown = any(math.isnan(tested[model].mean) for model in BASELINES)
    each = "does not hold" if better != ["intention"] else UNTESTED if unknown else "holds"
    return measured + (", ".join(map(named, better)) or "none"), each


def _against_baselines(cases: dict[str, Found], model: str, text: str, least: float) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = []
    for reward, found in cases.items():
        ahead = ratio(best(found, BASELINES), found.get(model, {}))
        beside = errors(found, (model, *BASELINES))
        measured = ahead and f"{reward} reward: the best baseline has {times(ahead)} times its MSE ({beside})"
        parts.append((measured or "", by_margin(ahead, least)))
    where = "section 5.3, Figure 9" if model == "intention" else "abstract, Figure 9"
    return Claim(text, where, _text(parts), together([each for _, each in parts]))


def _against_intention(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        ahead = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = ahead and f"{reward} reward: linear attention has {times(ahead)} times the MSE of Intention"
        parts.append((measured or "", verdict(ahead, 1)))
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
