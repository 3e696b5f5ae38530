"""What the rows of `policy` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import Found, best, by_model, errors, named, ratio, together, verdict
from intention.lab.experiments.policy_figures import REWARDS, final
from intention.lab.results import Row

BASELINES = ("attention", "neural_process", "mlp")


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {reward: by_model(final(rows, reward)) for reward in REWARDS}
    cases = {reward: found for reward, found in cases.items() if found}
    only = [_only(reward, found) for reward, found in cases.items()]
    text = "Intention is the only model that shows significant improvement on the task"
    return [
        Claim(text, "section 5.3, Figure 9", _text(only), together([each for _, each in only])),
        _against_baselines(
            cases, "intention", "Intention predicts the target better than MLP, Neural Process and Attention"
        ),
        _against_baselines(
            cases, "sigma_intention", "Both new modules are put to the test: σIntention beats the baselines"
        ),
        _against_intention(cases),
        _no_training(cases),
    ]


def _only(reward: str, found: Found) -> tuple[str, str]:
    """Who is better than always predicting the mean, with the interval over seeds wholly on that side?"""
    gains = {model: ratio(found.get("zero", {}), found.get(model, {})) for model in ("intention", *BASELINES)}
    tested = {model: gain for model, gain in gains.items() if gain is not None}
    if "intention" not in tested or len(tested) < 2 or tested["intention"].count < 2:  # one seed has no interval
        return "", verdict(None, 1)
    better = [model for model, gain in tested.items() if verdict(gain, 1) == "holds"]
    measured = (
        f"{reward} reward: MSE {errors(found, (*tested, 'zero'))}; better than the mean with an interval below it: "
    )
    return measured + (", ".join(map(named, better)) or "none"), "holds" if better == ["intention"] else "does not hold"


def _against_baselines(cases: dict[str, Found], model: str, text: str) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = []
    for reward, found in cases.items():
        times = ratio(best(found, BASELINES), found.get(model, {}))
        measured = (
            f"{reward} reward: the best baseline has {times} times its MSE ({errors(found, (model, *BASELINES))})"
        )
        parts.append(("" if times is None else measured, verdict(times, 1)))
    where = "section 5.3, Figure 9" if model == "intention" else "abstract, Figure 9"
    return Claim(text, where, _text(parts), together([each for _, each in parts]))


def _against_intention(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        times = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = f"{reward} reward: linear attention has {times} times the MSE of Intention"
        parts.append(("" if times is None else measured, verdict(times, 1)))
    text = "The covariance matters: without it (linear attention, the same layers) the error is larger"
    return Claim(text, "theorem 2.8, our own line", _text(parts), together([each for _, each in parts]))


def _no_training(cases: dict[str, Found]) -> Claim:
    parts = []
    for reward, found in cases.items():
        worst = max(found.get("intention_exact", {}).values(), default=None)
        measured = "" if worst is None else f"{reward} reward: largest MSE of a seed {worst:.1g}"
        parts.append((measured, verdict(None, 1) if worst is None else "holds" if worst < 1e-6 else "does not hold"))
    text = "Intention with an intercept on (x, d − ‖x‖²) finds the target without training"
    return Claim(text, "our own line", _text(parts), together([each for _, each in parts]))


def _text(parts: Sequence[tuple[str, str]]) -> str:
    return "; ".join(measured for measured, _ in parts if measured)
