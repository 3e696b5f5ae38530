"""Figure 3: the smallest latent size with which a model learns least squares, against the dimension of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from intention.lab.core.device import answer
from intention.lab.core.place import Place
from intention.lab.core.train import Diverged, Plan, train
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.scaling.claims import claims, finding
from intention.lab.experiments.scaling.figures import REFERENCE, plot
from intention.lab.experiments.scaling.model import MODELS, Exact, Layers, build
from intention.lab.experiments.scaling.task import regression
from intention.lab.tasks import Episode

__all__ = [
    "EXCLUSIVE",
    "PLACE",
    "PRESETS",
    "READING",
    "SECONDS",
    "TITLE",
    "Config",
    "claims",
    "finding",
    "jobs",
    "plot",
    "run",
]

TITLE = "Learning least squares: the latent size that is needed"
PLACE = "section 2, Figure 3, appendix “Scaling experiment”"
EXCLUSIVE = False
SECONDS = {"quick": 150, "standard": 1550}  # on one core, all runs
READING = """
- Ten pairs (x, y = xW) are given, W is asked (d numbers). The latent size s of all layers doubles until the mean
  squared error on 1000 held-out tasks is below **0.1**; the paper does not print its threshold. Predicting 0 has an
  error of 1. "Double" is printed as s², the last size 8192 as 8196.
- Every embedding reads the pairs [x, y]. With the printed E_Q = 0 the output would be 0: the model returns w, flattened
  into e_P. That layer has s³ parameters, so that Intention and linear attention end at s = 512 in the paper preset.
- σIntention and linear attention have Intention's embeddings. σIntention has no w: its queries are its keys, and e_P
  reads the mean of its outputs at the ten pairs, as Attention's does; it has as many heads and `scale="variance"`.
  Linear attention divides by the number of pairs.
- α is not given: it is learnable and starts at 1. The 5 heads of Attention have s dimensions each. The rate decays
  along a cosine and gradients are clipped at norm 1, which the paper does not mention.
- The paper preset has the printed rate of 3·10⁻⁴. Quick and standard train for 350 and 1000 steps, at one rate for all
  models: 10⁻², the best of 3·10⁻⁴, 10⁻³, 3·10⁻³ and 10⁻² for every single model (d = 2 and 4, s = 16, 300 steps; again
  at d = 4, s = 64, 1000 steps; one seed). Their sizes end at 128 (64 for the models that cost most): a wider Neural
  Process would want a lower rate (s = 256, d = 4: 0.063 with 3·10⁻³, 0.120 with 10⁻²).
- A size that is not enough here may be enough after 100000 steps: the sizes are those of this training, and **short
  training can support "needs more", not "exponentially many"**. All are powers of two, so seeds
  often agree; then there is no interval, and the number of seeds is given.
- "Exponential" is judged for each of MLP, NP and Attention. It holds if at least four dimensions were solved by all
  seeds, the size grows with every seed, and a straight line fits log s better against d than against log d; with fewer
  dimensions it is not decided. It does not hold if the size does not grow with every seed, or grows as a power. It is
  not tested with fewer than three seeds or nothing to fit (the smallest dimension was not solved, or there is no second
  one). Where a size was not reached, the next one of the grid is counted: a lower bound, marked ≥.
- "Needs a smaller size" is judged in each dimension, by seed: it holds if it does with all seeds, three at least, and
  does not if it does with none. A baseline that has not reached the threshold in the smallest dimension has not learnt
  the task, and is not beaten.
- No training: least squares itself (`F.intention` on the raw pairs, α = 0) is exact for d ≤ 10 with d numbers.
"""

TWO = Layers(2, 2)
FLATTENED = replace(TWO, largest=512)  # flattens w into a layer of s^3 parameters
SIGMA = replace(TWO, heads=5, scale="variance")
ATTENTION = Layers(1, 1, heads=5, slope=0.01)
NEURAL_PROCESS = Layers(2, 4)
MLP = Layers(0, 4)


@dataclass(frozen=True)
class Config:
    """The smallest latent size that learns least squares."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)
    dims: tuple[int, ...] = chooses(tuple(range(2, 11)))
    pairs: int = 10
    smallest: int = 2  # sizes double from here
    threshold: float = 0.1  # on the mean squared error
    steps: int = 100_000
    batch: int = 64
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float = 1.0
    alpha: float = 1.0  # at the start
    evaluation_tasks: int = 1000
    intention: Layers = FLATTENED
    sigma_intention: Layers = SIGMA
    linear_attention: Layers = FLATTENED
    attention: Layers = ATTENTION
    neural_process: Layers = NEURAL_PROCESS
    mlp: Layers = MLP

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        require(self.seeds >= 1, f"seeds must be at least 1, got {self.seeds}")
        require(bool(self.dims), "dims must name at least one dimension of x, got none")
        require(min(self.dims) >= 1, f"dims must be at least 1, got {self.dims}")
        require(self.pairs >= max(self.dims), f"{max(self.dims)} unknowns need as many pairs, got pairs={self.pairs}")
        require(self.smallest >= 1, f"smallest must be at least 1, got {self.smallest}")
        require(self.threshold > 0, f"threshold must be > 0, got {self.threshold}")
        require(self.alpha > 0, f"alpha must be > 0, got {self.alpha}")
        require(self.evaluation_tasks >= 2, f"evaluation_tasks must be at least 2, got {self.evaluation_tasks}")
        for model in MODELS:
            least = 0 if model == "mlp" else 1
            layers: Layers = getattr(self, model)
            require(layers.embed >= least, f"{model}.embed must be at least {least}, got {layers.embed}")
            least = self.smallest
            require(layers.largest >= least, f"{model}.largest must be at least {least}, got {layers.largest}")
        self.plan()

    def plan(self) -> Plan:
        return Plan(self.steps, self.batch, self.learning_rate, self.schedule, clip=self.clip)

    def sizes(self, model: str) -> list[int]:
        """The grid: smallest, 2 smallest, 4 smallest, ... up to the cap of the model."""
        doublings = (getattr(self, model).largest // self.smallest).bit_length()
        return [self.smallest << power for power in range(doublings)]


PAPER = Config()
STANDARD = replace(
    PAPER,
    dims=(2, 3, 4, 6, 8),
    steps=1000,
    learning_rate=1e-2,
    intention=replace(FLATTENED, largest=64),
    sigma_intention=replace(SIGMA, largest=128),
    linear_attention=replace(FLATTENED, largest=64),
    attention=replace(ATTENTION, largest=64),
    neural_process=replace(NEURAL_PROCESS, largest=128),
    mlp=replace(MLP, largest=128),
)
QUICK = replace(STANDARD, dims=(2, 4, 6), smallest=4, steps=350)
PRESETS = {
    "quick": replace(QUICK, **{model: replace(getattr(QUICK, model), largest=32) for model in MODELS}),
    "standard": STANDARD,
    "paper": PAPER,
}


def jobs(config: Config) -> Iterable[Job]:
    """One walk up the sizes per model, dimension and seed, and the exact solution beside them."""
    names = (*config.models, REFERENCE)
    return [
        Job("scaling", config, model, seed, {"d": d})
        for d in sorted(set(config.dims), reverse=True)  # the long walks first
        for seed in range(config.seeds)
        for model in names
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    """An "mse" for every size that was tried, and the "smallest" that was enough: None if the largest was not."""
    config, d = job.config, job.at["d"]
    test = regression(config.evaluation_tasks, config.pairs, d, torch.Generator().manual_seed(1_000_000 + job.seed))
    if job.model == REFERENCE:
        yield _error(Exact(), Episode(*(x.double() for x in test)), d, None)
        return
    sizes = config.sizes(job.model)
    for walked, size in enumerate(sizes):
        measure = _trained(job, size, test, _part(place, size, walked, len(sizes)))
        yield measure
        if measure.value is not None and measure.value < config.threshold:
            yield Measure("smallest", size, x=d, data={"d": d, "tried": size})
            return
    yield Measure("smallest", None, x=d, data={"d": d, "tried": sizes[-1]})


def _trained(job: Job, size: int, test: Episode, place: Place) -> Measure:
    config, d = job.config, job.at["d"]
    torch.manual_seed(job.seed)
    model = build(job.model, d, config.pairs, size, getattr(config, job.model), config.alpha)

    def sample(batch: int, generator: torch.Generator) -> Episode:
        return regression(batch, config.pairs, d, generator)

    try:
        train(model, sample, loss, config.plan(), seed=job.seed, place=place)
    except Diverged:
        return Measure("mse", None, x=size, data={"d": d})
    return _error(model, test, d, size)


def loss(model: nn.Module, episode: Episode) -> Tensor:
    return (model(episode.query, episode.key, episode.value) - episode.target).square().mean()


@torch.no_grad()
def _error(model: nn.Module, test: Episode, d: int, size: int | None) -> Measure:
    context = zip(test.query.split(250), test.key.split(250), test.value.split(250), strict=True)
    predicted = torch.cat([answer(model, *part) for part in context])
    errors = (predicted - test.target).square().mean((-2, -1))  # one per task
    mean, half = float(errors.mean()), 1.96 * float(errors.std()) / len(errors) ** 0.5
    return Measure("mse", mean, x=size, interval=(mean - half, mean + half), data={"d": d})


def _part(place: Place, size: int, walked: int, sizes: int) -> Place:
    """Each size has its own checkpoint; progress runs over the whole walk, which may end early."""
    folder = None if place.folder is None else place.folder / f"s{size}"
    tell = place.tell
    if tell is None:
        return replace(place, folder=folder)
    return replace(
        place,
        folder=folder,
        tell=lambda step, steps, values: tell(walked * steps + step, sizes * steps, {**values, "size": size}),
    )
