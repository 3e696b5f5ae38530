"""Section 2's closing argument, measured: how many linear-attention layers equal one Intention layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.lab.experiments.base import Claim, Job, Measure, Plot, chooses, require
from intention.lab.experiments.compare import UNTESTED
from intention.lab.experiments.layers_figures import NAMES, draw_gaps, draw_layers
from intention.lab.models.descent import Steps, chebyshev, constant, left, padded, stack, unit_queries, worst_case
from intention.lab.place import Place
from intention.lab.results import Estimate, Row, estimate, estimate_log, select
from intention.lab.tasks.linear import Problem, conditioned
from intention.lab.train import Plan, train

TITLE = "Layers of linear attention that equal one Intention"
PLACE = "section 2, closing argument"
READING = """
- A layer is one call of linear attention with residual values, v ← v − η K K'v, and the same for the queries, p ← p +
  η Q K'v: gradient descent on least squares. The optimality gap is |w − w*|², with w* standard normal: d at the
  start. Counted are layers until it is 0.1 for d = 1000, a factor of 10⁻⁴. "Reduce by 0.1" at κ = 1.1 is read as
  times 0.1.
- κ is the ratio of the largest eigenvalue L of K'K to the smallest, μ. Worst case: all of w* along the slowest
  direction. Measured: the mean over held-out random problems in `d` dimensions (a smaller d, the same factor),
  eigenvalues log-uniform between μ = 1 and L = κ, both ends included.
- Step sizes: 1/L, which the text calls perfect; 2/(L + μ), the best constant; one learned for each layer, by Adam
  through the stack on random problems of that κ, one stack for each depth; and Chebyshev's, the best for the worst
  case. On average over problems learned ones can do better than those.
- The settings of the learned steps (300 steps in `quick`, rate 0.03) were chosen among about 12 that were tried on seed
  0 with κ = 10, 30 and 100; that seed is among the published ones. The other step sizes have nothing to choose.
- The same step sizes serve all problems of a κ. Float64, no α.
"""
EXCLUSIVE = False
SECONDS = {"quick": 30}  # on one core, all runs

MODELS = ("step_l", "step_l_mu", "chebyshev", "learned", "intention")
TENTH = 0.1


@dataclass(frozen=True)
class Config:
    """Condition numbers, the gap to reach, the random problems and the training of the step sizes."""

    kappas: tuple[float, ...] = chooses((1.1, 2.0, 5.0, 10.0, 30.0, 100.0))
    dimension: int = 1000  # of the paper's example: the gap at the start
    goal: float = 0.1  # the gap at the end
    d: int = 32
    points: int = 48
    problems: int = 64  # held out
    steps: int = 300
    batch: int = 8
    learning_rate: float = 0.03
    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)

    def __post_init__(self) -> None:
        require(bool(self.kappas) and min(self.kappas) > 1, f"kappas must be > 1, got {self.kappas}")
        require(0 < self.goal < self.dimension, f"0 < goal < dimension, got {self.goal} and {self.dimension}")
        require(2 <= self.d <= self.points, f"2 <= d <= points, got {self.d} and {self.points}")
        require(min(self.problems, self.steps, self.batch) >= 1, "problems, steps and batch must be >= 1")
        require(set(self.models) <= set(MODELS), f"models are {MODELS}, got {self.models}")
        require(self.seeds >= 1, f"seeds must be >= 1, got {self.seeds}")

    @property
    def ratio(self) -> float:
        """What is left of the gap at the end."""
        return self.goal / self.dimension


quick = Config()
standard = replace(quick, kappas=(*quick.kappas, 300.0), d=64, points=96, steps=800, batch=16)
PRESETS = {"quick": quick, "standard": standard, "paper": standard}


def jobs(config: Config) -> list[Job]:
    return [
        Job("layers", config, model, seed, {"kappa": kappa})
        for model in config.models
        for kappa in config.kappas
        for seed in range(config.seeds)
    ]


def depths(kappa: float, ratio: float) -> list[int]:
    """The depths that are tried: up to where Chebyshev's steps are sure to be there."""
    most = math.ceil(worst_case("chebyshev", kappa, ratio))
    return list(range(max(1, most * 2 // 3), most + 1))


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, kappa = job.config, float(job.at["kappa"])
    generator = torch.Generator().manual_seed(1_000_000 + job.seed)  # held out, the same for all models of a seed
    problem = conditioned(config.problems, config.points, config.d, kappa, generator)
    curve = _learned_curve(job, kappa, problem, place) if job.model == "learned" else _fixed_curve(job, kappa, problem)
    yield Measure("layers", first(curve, config.ratio), x=kappa, data=_thinned(curve))
    yield Measure("layers, worst case", worst_case(job.model, kappa, config.ratio), x=kappa)
    yield Measure("gap left", min(curve.values()), x=kappa)
    if job.model not in ("chebyshev", "learned"):  # those are tried at depths near the goal only
        yield Measure("layers to a tenth", first(curve, TENTH), x=kappa)
        yield Measure("layers to a tenth, worst case", worst_case(job.model, kappa, TENTH), x=kappa)


@torch.no_grad()
def _fixed_curve(job: Job, kappa: float, problem: Problem) -> dict[int, float]:
    """What is left of the gap by number of layers, where no step is learned."""
    if job.model in ("step_l", "step_l_mu"):
        return _constant_curve(job.model, kappa, problem, job.config.ratio)
    if job.model == "intention":
        found = F.intention(unit_queries(problem), problem.key, problem.value, alpha=0)
        assert isinstance(found, Tensor)
        return {1: left(found, problem.w).item()}
    tried = depths(kappa, job.config.ratio)
    *_, last = stack(padded(kappa, tried, chebyshev), unit_queries(problem), problem)
    return dict(zip(tried, left(last, problem.w).tolist(), strict=True))


def _constant_curve(model: str, kappa: float, problem: Problem, ratio: float) -> dict[int, float]:
    """What is left after 1, 2, ... layers, until the goal; the worst case bounds the number."""
    most = math.ceil(worst_case(model, kappa, ratio)) + 1
    steps = torch.full((1, most), constant(model, kappa), dtype=torch.float64)  # one stack
    curve: dict[int, float] = {}
    for index, prediction in enumerate(stack(steps, unit_queries(problem), problem), 1):
        curve[index] = left(prediction, problem.w).item()
        if curve[index] <= ratio:
            break
    return curve


def _learned_curve(job: Job, kappa: float, problem: Problem, place: Place) -> dict[int, float]:
    """Train the stacks of all depths beside each other, then measure them on the held-out problems."""
    config, tried = job.config, depths(kappa, job.config.ratio)
    model = Steps(kappa, tried)
    plan = Plan(steps=config.steps, batch=config.batch, learning_rate=config.learning_rate, clip=0.0)

    def sample(batch: int, generator: torch.Generator) -> Problem:
        return conditioned(batch, config.points, config.d, kappa, generator)

    def loss(model: nn.Module, problem: Problem) -> Tensor:
        return model(problem).log().mean()  # stacks share nothing: each minimises its own gap

    train(model, sample, loss, plan, seed=job.seed, place=place)
    with torch.no_grad():
        return dict(zip(tried, model(problem).tolist(), strict=True))


def first(curve: Mapping[int, float], ratio: float) -> float | None:
    """The fewest layers that are there; None if none of those tried is."""
    return next((float(layers) for layers in sorted(curve) if curve[layers] <= ratio), None)


def _thinned(curve: Mapping[int, float], most: int = 60) -> dict[str, list[float]]:
    layers = sorted(curve)
    kept = [layer for i, layer in enumerate(layers) if i % math.ceil(len(layers) / most) == 0 or layer == layers[-1]]
    return {"layers": [float(x) for x in kept], "left": [float(f"{curve[layer]:.4g}") for layer in kept]}


# --- what the rows say ------------------------------------------------------------------------------------------------


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
    near = [count is not None and abs(count - 24) <= 2 for count in (printed, best)]
    verdict = "holds" if all(near) else "partly" if any(near) else "does not hold"
    verdict = UNTESTED if printed is None or best is None else verdict
    return Claim(text, "section 2", _listed(rows, MODELS, 10.0), verdict)


def _one_step(rows: Sequence[Row]) -> Claim:
    text = "to reduce it by 0.1 we would need just one step if the conditioning number was 1.1"
    found = [layers_at(rows, model, 1.1, "layers to a tenth") for model in ("step_l", "step_l_mu")]
    tested = all(worst is not None and math.isfinite(measured.mean) for measured, worst in found)
    holds = [measured.mean == 1 and worst == 1 for measured, worst in found]
    sure = all(holds) and all(measured.count > 1 for measured, _ in found)
    verdict = "holds" if sure else "partly" if any(holds) else "does not hold"
    measured = "to a tenth of the gap: " + _listed(rows, ("step_l", "step_l_mu"), 1.1, "layers to a tenth")
    measured += ". To 0.1 from d = 1000: " + _listed(rows, ("step_l", "step_l_mu"), 1.1)
    return Claim(text, "section 2", measured if tested else "", verdict if tested else UNTESTED)


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
    best = ratios["step_l_mu"].values()
    refuted, perfect = all(value.low > 1 for value in best), all(value.high <= 1 for value in best)
    verdict = "does not hold" if refuted else "holds" if perfect else "partly"
    return Claim(text, "section 2", "; ".join(parts), verdict if best else UNTESTED)


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
    verdict = "does not hold" if most >= 1e-20 else "holds" if sure else "partly"
    return Claim(text, "section 2", measured, verdict)


def _growth(rows: Sequence[Row]) -> Claim:
    """The power of kappa with which the number of layers grows, from kappa >= 5."""
    text = "its exact speed depends on the conditioning number"
    parts, grows, likely = [], [], []
    for model in MODELS[:-1]:
        powers = []
        for seed in sorted({row.seed for row in select(rows, model=model)}):
            found = [
                row
                for row in select(rows, model=model, metric="layers", seed=seed)
                if row.value and row.x and row.x >= 5
            ]
            pairs = [(math.log(row.x), math.log(row.value)) for row in found]  # type: ignore[arg-type]
            if len(pairs) > 1:
                powers.append(statistics.linear_regression(*zip(*pairs, strict=True)).slope)
        if powers:
            power = estimate(powers)
            parts.append(f"{NAMES[model]}: layers grow as κ to the power {power}")
            grows.append(power.low > 0)
            likely.append(power.mean > 0)
    verdict = "holds" if all(grows) else "partly" if any(likely) else "does not hold"
    return Claim(text, "section 2", "; ".join(parts), verdict if grows else UNTESTED)


def plot(rows: Sequence[Row]) -> list[Plot]:
    kappas = sorted({row.x for row in select(rows, metric="layers") if row.x is not None})
    if not kappas:
        return []
    table = [["κ", *(NAMES[model] for model in MODELS)]]
    for kappa in kappas:
        table.append([f"{kappa:g}", *(_cell(rows, model, kappa) for model in MODELS)])
    caption = (
        "Points: mean over random problems (seeds); lines: worst case. Until the gap is 10⁻⁴ of what it was. A cross: "
        "the deepest stack that was tried, where not all seeds got there."
    )
    points = {model: _points(rows, model, "layers", kappas) for model in MODELS}
    worst = {model: _points(rows, model, "layers, worst case", kappas) for model in MODELS if model != "learned"}
    missed = {model: _missed(rows, model, kappas) for model in MODELS}
    plots = [Plot("Layers that equal one Intention", caption, partial(draw_layers, points, worst, missed))]
    cells = "On random problems; in brackets the worst case. Chebyshev's worst case bounds the learned steps too."
    plots.append(Plot("Layers needed", cells, table=table))
    shown = 10.0 if 10.0 in kappas else kappas[-1]
    curves = [row for row in select(rows, metric="layers", x=shown, seed=0) if row.data]
    if curves:
        caption = (
            "What is left of |w − w*|² on random problems. Learned and Chebyshev steps: a stack for each depth. "
            "Intention lies far below the axis."
        )
        drawn = {row.model: row.data for row in curves if row.data}
        plots.append(Plot(f"The gap, layer by layer, at κ = {shown:g}", caption, partial(draw_gaps, drawn)))
    return plots


def _points(rows: Sequence[Row], model: str, metric: str, kappas: Sequence[float]) -> list[tuple[float, float]]:
    found = [(kappa, over_seeds(rows, model, metric, kappa).mean) for kappa in kappas]
    return [(kappa, mean) for kappa, mean in found if math.isfinite(mean)]


def _missed(rows: Sequence[Row], model: str, kappas: Sequence[float]) -> list[tuple[float, float]]:
    """Where not all seeds reached the goal: the deepest stack."""
    found = [(kappa, select(rows, model=model, metric="layers", x=kappa)) for kappa in kappas]
    deepest = [(kappa, [max(r.data["layers"]) for r in here if r.value is None and r.data]) for kappa, here in found]
    return [(kappa, max(depths)) for kappa, depths in deepest if depths]


def _cell(rows: Sequence[Row], model: str, kappa: float) -> str:
    measured, worst = layers_at(rows, model, kappa)
    if worst is None:
        return "–"
    found = f"{measured.mean:.3g}" if math.isfinite(measured.mean) else "not reached"
    return found if model in ("learned", "intention") else f"{found} ({worst})"
