"""Generalised Kabsch: learn to apply a rotation, scale and translation that 5 pairs of points show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intention.lab.experiments import kabsch_figures as figures
from intention.lab.experiments.base import Claim, Job, Measure, Net, Place, Plot, chooses, require
from intention.lab.experiments.compare import Found, best, by_model, errors, named, ratio, together, verdict
from intention.lab.experiments.kabsch_figures import DIMS
from intention.lab.experiments.policy import check_net, loss, numbers, over_tasks, predict_in_parts, task_errors
from intention.lab.files import LabError
from intention.lab.models import references
from intention.lab.models.kabsch import MODELS, build
from intention.lab.results import Row, estimate, select
from intention.lab.tasks import Episode, clouds, kabsch
from intention.lab.train import SCHEDULES, Plan, train

TITLE = "Generalised Kabsch"
PLACE = "section 5.4, Figures 10 and 11, appendix “Learning generalised Kabsch algorithm”"
EXCLUSIVE = False
READING = """
- The paper gives no ranges: keys and queries ~ N(0, I), rotation uniform, scale U(½, 2), translation N(0, I), noise
  0.05 on the values, 5 points, 5 queries, targets without noise. All are fields of the config.
- e(K, V, Q) would need as many queries as points and break the symmetry of the points: e_K(K), e_K(Q) and e_V(V), each
  point on its own, and e_P answers each query on its own, so that a trained model maps clouds of any size. The MLP
  reads all numbers at once and answers its 5 queries at once. The Neural Process sees the query in e_P.
- α is learnable; its start is not given: 0.1. The 5 heads of Attention have the full size each, projected back.
- σIntention and linear attention have Intention's layers; linear attention divides by the number of points.
- Neither the number of steps, the batch nor a schedule is given: 50,000 steps of 64 tasks in `paper`, a cosine,
  gradients clipped at norm 1. `quick` and `standard` have half the widths and batches of 32.
- No training: affine least squares *is* Intention with an intercept and α = 0 on the raw points, exact without noise.
  Umeyama's closed form knows that the map is a similarity, so its error is smaller. Ridge on raw features (α = 0.1) has
  no intercept and cannot translate. The error of affine least squares has heavy tails (its variance over tasks is not
  finite for 5 points in the plane, its mean is not for 5 points in space).
- The rabbit is our own drawing (the paper's is not given); `--cloud FILE` maps another one, in 2-D or 3-D by its
  columns. A cloud is normalised to mean 0 and variance 1 and mapped back; 5 of its points, drawn at random, are
  observed with noise. At most 400 of its points, drawn at random, are mapped and shown.
"""

BASELINES = ("attention", "neural_process", "mlp")
WITHOUT_TRAINING: dict[str, Callable[[Episode], Tensor]] = {
    "zero": references.zero,
    "ridge_raw": references.kabsch_ridge,
    "affine": references.affine,
    "umeyama": references.umeyama,
}
SIGMA = "Both new modules are put to the test: σIntention beats the baselines"
ON_CLOUD = "relative error on the cloud"
SHOWN = 400  # points of a cloud
WIDE = 5.0  # times: a wide margin
NEAR = 0.1  # of the extent of the cloud


@dataclass(frozen=True)
class Config:
    """Generalised Kabsch."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)
    cloud: str = chooses("")  # file of points to map, npz, npy, ply or csv; its columns decide dims. Default: a rabbit
    dims: Literal[2, 3] = chooses(2)
    steps: int = 50_000
    batch: int = 64
    points: int = 5
    queries: int = 5
    noise: float = 0.05
    smallest: float = 0.5  # scale
    largest: float = 2.0
    evaluation_tasks: int = 2000
    evaluations: int = 10  # during training
    alpha: float = 0.1  # at the start
    schedule: str = "cosine"
    clip: float = 1.0
    intention: Net = Net((128, 128), (128, 128, 2))
    sigma_intention: Net = Net((128, 128), (128, 128, 2))
    linear_attention: Net = Net((128, 128), (128, 128, 2))
    attention: Net = Net((256, 256), (256, 256, 2), heads=5)
    neural_process: Net = Net((256, 256), (256, 256, 2))
    mlp: Net = Net((), (256, 256, 256, 10))

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        require(self.schedule in SCHEDULES, f"schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        require(self.dims in (2, 3), f"dims must be 2 or 3, got {self.dims}")
        require(self.points > self.dims, f"points must be more than dims, got {self.points} in {self.dims} dimensions")
        for name, least in (("seeds", 1), ("queries", 1), ("evaluation_tasks", 2), ("evaluations", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        require(0 < self.smallest <= self.largest, f"scale wants 0 < {self.smallest} <= {self.largest}")
        require(self.noise >= 0, f"noise must be >= 0, got {self.noise}")
        require(self.alpha > 0, f"alpha must be > 0, got {self.alpha}")
        for model in MODELS:
            check_net(model, getattr(self, model))
            self.plan(model)

    def plan(self, model: str) -> Plan:
        rate = getattr(self, model).learning_rate
        every = max(1, self.steps // self.evaluations)
        return Plan(self.steps, self.batch, rate, self.schedule, clip=self.clip, evaluate_every=every)

    def sample(self, batch: int, generator: torch.Generator, dims: int) -> Episode:
        return kabsch.sample(
            batch,
            generator,
            points=self.points,
            queries=self.queries,
            dims=dims,
            noise=self.noise,
            smallest=self.smallest,
            largest=self.largest,
        )


PAPER = Config()
STANDARD = replace(
    PAPER,
    steps=10_000,
    batch=32,
    intention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    sigma_intention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    linear_attention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    attention=Net((128, 128), (128, 128, 2), learning_rate=1e-3, heads=5),
    neural_process=Net((128, 128), (128, 128, 2), learning_rate=3e-3),
    mlp=Net((), (128, 128, 128, 10), learning_rate=3e-3),
)
PRESETS = {"quick": replace(STANDARD, steps=1500), "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    """A cloud is read here, so that a file that does not serve fails before any work. Its digest names the run."""
    at: dict[str, Any] = {"dims": config.dims}
    shown = at
    if config.cloud:
        cloud = clouds.load_cloud(config.cloud)
        if len(cloud.points) < config.points or cloud.dims >= config.points:
            got = f"{config.cloud} has {len(cloud.points)} points in {cloud.dims}-D, and {config.points} are observed"
            raise LabError(f"{got}; wanted no more than it has, and more than dimensions: change --points")
        at = {"dims": cloud.dims}
        shown = {**at, "cloud": cloud.digest}
    models = (*config.models, "references")
    return [
        Job("kabsch", config, model, seed, shown if model == "intention" else at)
        for seed in range(config.seeds)
        for model in models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    dims: int = job.at["dims"]
    sample = partial(config.sample, dims=dims)
    held_out = sample(config.evaluation_tasks, torch.Generator().manual_seed(1_000_000 + job.seed))
    if job.model == "references":
        yield from _references(config, held_out, dims)
        return
    net: Net = getattr(config, job.model)
    torch.manual_seed(job.seed)
    model = build(
        job.model,
        net.embed,
        net.decode,
        heads=net.heads,
        alpha=config.alpha,
        dims=dims,
        points=config.points,
        queries=config.queries,
    )
    measured = lambda model: {"mse": float(task_errors(predict_in_parts(model, held_out), held_out).mean())}  # noqa: E731
    for entry in train(model, sample, loss, config.plan(job.model), seed=job.seed, place=place, evaluate=measured):
        yield Measure("mse during training", entry["mse"], entry["step"], data={"dims": dims})
    yield over_tasks("mse", task_errors(predict_in_parts(model, held_out), held_out), {"dims": dims})
    if job.model == "intention":
        yield from _map_cloud(model, config, dims)


def _references(config: Config, held_out: Episode, dims: int) -> Iterator[Measure]:
    for name, predict in WITHOUT_TRAINING.items():
        yield over_tasks("mse", task_errors(predict(held_out), held_out), {"dims": dims}, name)
    clear = replace(config, noise=0.0).sample(config.evaluation_tasks, torch.Generator().manual_seed(7), dims)
    for name in ("affine", "umeyama"):
        error = task_errors(WITHOUT_TRAINING[name](clear), clear)
        yield over_tasks("mse without noise", error, {"dims": dims}, name)


@torch.no_grad()
def _map_cloud(model: nn.Module, config: Config, dims: int) -> Iterator[Measure]:
    """One map, the same for all seeds, shown by 5 points of the cloud with noise and applied to the others."""
    generator = torch.Generator().manual_seed(7)
    if not config.cloud and dims == 3:
        return  # the rabbit is flat
    cloud = clouds.load_cloud(config.cloud) if config.cloud else clouds.rabbit(SHOWN, generator)
    scale = {"smallest": config.smallest, "largest": config.largest}
    mapping = kabsch.similarities(1, generator, dims=dims, **scale)
    query, key = cloud.thinned(SHOWN, generator)[None], cloud.thinned(config.points, generator)[None]
    value = mapping(key) + config.noise * torch.randn(key.shape, generator=generator)
    episode = Episode(query, key, value, mapping(query))
    predicted = model(query, key, value)
    extent = (episode.target - episode.target.mean(-2, keepdim=True)).square().mean().sqrt()
    closed = {name: WITHOUT_TRAINING[name](episode) for name in ("affine", "umeyama")}
    for name, answer in {None: predicted, **closed}.items():
        error = (answer - episode.target).square().mean().sqrt() / extent
        yield Measure(ON_CLOUD, float(error), data={"dims": dims, "cloud": cloud.name}, model=name)
    drawn = {"cloud": query, "target": episode.target, "key": key, "value": value, "predicted": predicted}
    points = {name: numbers(cloud.back(x[0])) for name, x in drawn.items()}
    yield Measure("cloud", None, data={"dims": dims, "name": cloud.name, **points})


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {dims: by_model(figures.of(select(rows, metric="mse"), dims)) for dims in DIMS}
    cases = {dims: found for dims, found in cases.items() if found}
    return [
        _against_baselines(cases, "intention", "Intention beats the baselines by a wide margin", WIDE),
        _near_least_squares(cases),
        _any_points(rows),
        _against_baselines(cases, "sigma_intention", SIGMA, 1),
        _against_intention(cases),
        _no_training(rows),
    ]


def _against_baselines(cases: dict[int, Found], model: str, text: str, least: float) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = []
    for dims, found in cases.items():
        times = ratio(best(found, BASELINES), found.get(model, {}))
        each = verdict(times, least)
        if each == "does not hold" and verdict(times, 1) == "holds":
            each = "partly"  # ahead, but not by a wide margin
        measured = f"the best baseline has {times} times its MSE ({errors(found, (model, *BASELINES))})"
        parts.append(("" if times is None else _case(dims, measured), each))
    if least > 1:
        text += f" (read as: at most 1/{least:g} of the best one's error)"
    return _claim(text, "section 5.4, Figure 10" if model == "intention" else "abstract, Figure 10", parts)


def _near_least_squares(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        times = ratio(found.get("intention", {}), found.get("affine", {}))
        inverse = ratio(found.get("affine", {}), found.get("intention", {}))  # at most twice: at least one half
        beside = errors(found, ("intention", "affine", "umeyama"))
        measured = _case(dims, f"{times} times the MSE of affine least squares ({beside})")
        parts.append(("" if times is None else measured, verdict(inverse, 0.5)))
    text = "The network learns to extract the map (read as: at most twice the error of affine least squares)"
    return _claim(text, "appendix “Learning generalised Kabsch algorithm”", parts)


def _any_points(rows: Sequence[Row]) -> Claim:
    """Errors of one map of a cloud, as shares of the extent of its image."""
    parts = []
    on_cloud = select(rows, metric=ON_CLOUD)
    for name in sorted({str((row.data or {}).get("cloud")) for row in on_cloud}):
        found = by_model(row for row in on_cloud if (row.data or {}).get("cloud") == name)
        error = estimate(list(found.get("intention", {}).values()))
        closed = {model: next(iter(values.values())) for model, values in found.items() if model in WITHOUT_TRAINING}
        beside = ", ".join(f"{named(model)} {value:.1%}" for model, value in closed.items())
        measured = f"{name}: {error.mean:.1%} of its extent over {error.count} seeds ({beside} from the same points)"
        each = "holds" if error.high <= NEAR else "partly" if error.mean <= NEAR else "does not hold"
        parts.append((measured, each))
    text = "The learned mapping can be applied to any set of points"
    return _claim(f"{text} (read as: r.m.s. error at most {NEAR:.0%} of its extent)", "section 5.4, Figure 11", parts)


def _against_intention(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        times = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = _case(dims, f"linear attention has {times} times the MSE of Intention")
        parts.append(("" if times is None else measured, verdict(times, 1)))
    text = "The covariance matters: without it (linear attention, the same layers) the error is larger"
    return _claim(text, "theorem 2.8, our own line", parts)


def _no_training(rows: Sequence[Row]) -> Claim:
    parts = []
    for dims in DIMS:
        found = by_model(figures.of(select(rows, metric="mse without noise", model="affine"), dims)).get("affine")
        if found:
            worst = max(found.values())
            parts.append((_case(dims, f"largest MSE {worst:.1g}"), "holds" if worst < 1e-6 else "does not hold"))
    text = "Without noise, Intention with an intercept finds the map without training (affine least squares)"
    return _claim(text, "our own line", parts)


def _case(dims: int, text: str) -> str:
    return text if dims == 2 else f"in {dims}-D: {text}"


def _claim(text: str, where: str, parts: Sequence[tuple[str, str]]) -> Claim:
    measured = "; ".join(measured for measured, _ in parts if measured)
    return Claim(text, where, measured, together([each for _, each in parts]))


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots: list[Plot] = []
    for dims in DIMS:
        if figures.of(select(rows, metric="mse during training"), dims):
            caption = (
                "Error on held-out tasks during training: seeds thin, their geometric mean thick, with its last value. "
                "Horizontal: closed forms on the same tasks."
            )
            title = "Error during training" if dims == 2 else f"Error during training, {dims}-D"
            plots.append(Plot(title, caption, partial(figures.draw_history, rows, dims)))
    for row in figures.clouds(rows):
        caption = (
            "A cloud, its target, the 5 observed points with their images (which have noise), and the prediction of "
            "Intention (orange) on the target (grey)."
        )
        data = row.data or {}
        plots.append(Plot(f"Mapping a cloud: {data['name']}", caption, partial(figures.draw_cloud, data)))
    return plots
