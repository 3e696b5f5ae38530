"""Policy distillation: the place of a target from 5 observations of its reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intention.lab.experiments import policy_figures as figures
from intention.lab.experiments.base import Claim, Job, Measure, Net, Place, Plot, chooses, require
from intention.lab.experiments.compare import Found, best, by_model, errors, named, ratio, together, verdict
from intention.lab.experiments.policy_figures import REWARDS
from intention.lab.models import references
from intention.lab.models.policy import MODELS, build
from intention.lab.results import Row
from intention.lab.tasks import Episode, policy
from intention.lab.tasks.policy import Reward
from intention.lab.train import SCHEDULES, Plan, train

TITLE = "Policy distillation"
PLACE = "section 5.3, Figures 8 and 9, appendix “Policy Distillation”"
EXCLUSIVE = False
READING = """
- O is 5×3 (the paper prints 5×2): x, y and the reward. N(0, 1/4) is a variance: the places have standard deviation ½.
- The appendix observes the squared distance ‖x − t‖², the text a Gaussian around the target. Both are run; the Gaussian
  is exp(−‖x − t‖² / 2), of width 1 (`width`).
- K = V = Q = O, so [K, V, Q] holds O thrice and has rank 3: α > 0 is needed. It is learnable; the paper does not give
  its start: 0.1 (`alpha`).
- Intention's w (9×512) is flattened into e_P. Attention and σIntention have no w: the points are their own queries and
  the 5 outputs are averaged before e_P. The 5 heads of Attention have the full size each, projected back.
- σIntention and linear attention have Intention's layers; linear attention divides by the number of points
  (w = K'E_V / N).
- Neither the number of steps, the batch nor a schedule is given: 50,000 steps of 64 tasks in `paper`, a cosine,
  gradients clipped at norm 1. `quick` and `standard` have half the widths and batches of 32.
- MSE is the mean over both coordinates; always predicting the mean of the targets has 1.
- No training: d − ‖x‖² = −2x't + ‖t‖² is linear in x with an intercept, so Intention with an intercept on
  (x, d − ‖x‖²) is exact, as trilateration is; for the Gaussian d is −2 log r. "Ridge on raw features" fits the reward
  as it is over x (α = 0.1) and follows its slope.
"""

BASELINES = ("attention", "neural_process", "mlp")
WITHOUT_TRAINING: dict[str, Callable[[Episode, Reward, float], Tensor]] = {
    "zero": lambda episode, reward, width: references.zero(episode),
    "ridge_raw": references.policy_ridge,
    "trilateration": references.trilateration,
    "intention_exact": references.intention_exact,
}
EXAMPLES = 4


@dataclass(frozen=True)
class Config:
    """Policy distillation."""

    models: tuple[str, ...] = chooses(MODELS)
    reward: tuple[Reward, ...] = chooses(REWARDS)
    seeds: int = chooses(3)
    steps: int = 50_000
    batch: int = 64
    points: int = 5
    width: float = 1.0  # of the Gaussian reward
    evaluation_tasks: int = 1000
    evaluations: int = 10  # during training
    alpha: float = 0.1  # at the start
    schedule: str = "cosine"
    clip: float = 1.0
    intention: Net = Net((512, 512), (128, 2), learning_rate=3e-5)
    sigma_intention: Net = Net((512, 512), (128, 2), learning_rate=3e-5)
    linear_attention: Net = Net((512, 512), (128, 2), learning_rate=3e-5)
    attention: Net = Net((128, 128), (2048, 2), learning_rate=3e-5, heads=5)
    neural_process: Net = Net((512, 512), (512, 512, 128, 2), learning_rate=3e-4)
    mlp: Net = Net((), (512, 512, 512, 2), learning_rate=3e-4)

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        unknown = set(self.reward) - set(REWARDS)
        require(not unknown, f"there is no reward {', '.join(sorted(unknown))}; there are {', '.join(REWARDS)}")
        require(self.schedule in SCHEDULES, f"schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        require(self.points >= 3, f"points must be at least 3, or the target is not determined; got {self.points}")
        for name, least in (("seeds", 1), ("evaluation_tasks", EXAMPLES), ("evaluations", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("width", "alpha"):
            require(getattr(self, name) > 0, f"{name} must be > 0, got {getattr(self, name)}")
        for model in MODELS:
            net: Net = getattr(self, model)
            check_net(model, net)
            require(net.decode[-1] == 2, f"{model}.decode ends with the place, 2 numbers, got {net.decode}")
            self.plan(model)

    def plan(self, model: str) -> Plan:
        rate = getattr(self, model).learning_rate
        every = max(1, self.steps // self.evaluations)
        return Plan(self.steps, self.batch, rate, self.schedule, clip=self.clip, evaluate_every=every)


def check_net(model: str, net: Net) -> None:
    """Sizes with which a model can be built."""
    require(all(size > 0 for size in (*net.embed, *net.decode)), f"sizes of {model} must be positive, got {net}")
    require(len(net.decode) > 0, f"{model}.decode must end with the size of the answer, got nothing")
    require(model == "mlp" or len(net.embed) > 0, f"{model}.embed must have at least one size, got nothing")
    require(net.heads >= 1, f"{model}.heads must be at least 1, got {net.heads}")


PAPER = Config()
STANDARD = replace(
    PAPER,
    steps=10_000,
    batch=32,
    intention=Net((256, 256), (64, 2), learning_rate=3e-3),
    sigma_intention=Net((256, 256), (64, 2), learning_rate=3e-3),
    linear_attention=Net((256, 256), (64, 2), learning_rate=3e-3),
    attention=Net((64, 64), (1024, 2), learning_rate=3e-3, heads=5),
    neural_process=Net((256, 256), (256, 256, 64, 2), learning_rate=1e-3),
    mlp=Net((), (256, 256, 256, 2), learning_rate=3e-3),
)
PRESETS = {"quick": replace(STANDARD, steps=2000), "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    models = (*config.models, "references")
    return [
        Job("policy", config, model, seed, {"reward": reward})
        for seed in range(config.seeds)
        for reward in config.reward
        for model in models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    reward: Reward = job.at["reward"]
    sample = partial(policy.sample, points=config.points, reward=reward, width=config.width)
    held_out = sample(config.evaluation_tasks, torch.Generator().manual_seed(1_000_000 + job.seed))
    if job.model == "references":
        for name, predict in WITHOUT_TRAINING.items():
            predicted = predict(held_out, reward, config.width)
            yield over_tasks("mse", task_errors(predicted, held_out), {"reward": reward}, name)
        return
    net: Net = getattr(config, job.model)
    torch.manual_seed(job.seed)
    model = build(job.model, net.embed, net.decode, heads=net.heads, alpha=config.alpha, points=config.points)
    measured = lambda model: {"mse": float(task_errors(predict_in_parts(model, held_out), held_out).mean())}  # noqa: E731
    steps = train(model, sample, loss, config.plan(job.model), seed=job.seed, place=place, evaluate=measured)
    for entry in steps:
        yield Measure("mse during training", entry["mse"], entry["step"], data={"reward": reward})
    predicted = predict_in_parts(model, held_out)
    yield over_tasks("mse", task_errors(predicted, held_out), {"reward": reward})
    yield Measure("examples", None, data={"reward": reward, **_examples(held_out, predicted, config.width)})


def loss(model: nn.Module, episode: Episode) -> Tensor:
    return (model(episode.query, episode.key, episode.value) - episode.target).square().mean()


@torch.no_grad()
def predict_in_parts(model: nn.Module, episode: Episode, size: int = 500) -> Tensor:
    """The predictions of many tasks without much memory."""
    parts = zip(*(x.split(size) for x in episode[:3]), strict=True)
    return torch.cat([model(*part) for part in parts])


def task_errors(predicted: Tensor, episode: Episode) -> Tensor:
    return (predicted - episode.target).square().mean((-2, -1))  # one per task


def over_tasks(metric: str, errors: Tensor, data: dict[str, Any], model: str | None = None) -> Measure:
    """The mean over tasks and its 95% interval."""
    mean, half = float(errors.mean()), 1.96 * float(errors.std()) / len(errors) ** 0.5
    return Measure(metric, mean, None, (mean - half, mean + half), data, model)


def _examples(episode: Episode, predicted: Tensor, width: float) -> dict[str, Any]:
    """The first tasks, for the picture."""
    return {
        "observed": numbers(episode.key[:EXAMPLES]),
        "target": numbers(episode.target[:EXAMPLES, 0]),
        "predicted": numbers(predicted[:EXAMPLES, 0]),
        "width": width,
    }


def numbers(x: Tensor) -> Any:
    """Nested lists with 4 digits after the point."""
    return [numbers(row) for row in x] if x.dim() > 1 else [round(float(number), 4) for number in x]


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {reward: by_model(figures.final(rows, reward)) for reward in REWARDS}
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
    if "intention" not in tested or len(tested) < 2:
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


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots: list[Plot] = []
    if any(row.model in MODELS for reward in REWARDS for row in figures.final(rows, reward)):
        exact = "; ".join(_exact(rows, reward) for reward in REWARDS if _exact(rows, reward))
        caption = (
            "Mean squared error over held-out tasks: a dot per seed, their geometric mean and its 95% interval. "
            f"Off the axis, without training: {exact or 'not run'}."
        )
        plots.append(Plot("Error by model", caption, partial(figures.draw_results, rows)))
    for reward in reversed(REWARDS):
        shown = figures.examples(rows, reward)
        if shown:
            caption = (
                "Four held-out tasks. Grey: the Gaussian reward around the target (+). Circles: the observations, "
                "their area by that reward. Stars: predictions. Below: a window around the target; a prediction that is not "
                "in it is further away."
            )
            plots.append(Plot(f"Examples, {reward} reward", caption, partial(figures.draw_examples, shown, reward)))
    groups = {f"{reward} reward": figures.history(rows, reward) for reward in REWARDS}
    groups = {title: found for title, found in groups.items() if found}
    if groups:
        caption = "Error on the held-out tasks during training: seeds thin, their geometric mean thick."
        plots.append(Plot("Error during training", caption, partial(figures.draw_history, groups)))
    return plots


def _exact(rows: Sequence[Row], reward: str) -> str:
    found = by_model(figures.final(rows, reward))
    text = errors(found, ("trilateration", "intention_exact"))
    return f"{reward} reward, {text}" if text else ""
