"""What the few-shot experiments share: their config, how a classifier is built, trained and judged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intention import kernels
from intention.lab import data
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.episodes import over_tasks
from intention.lab.models import encoders, fewshot
from intention.lab.place import Place
from intention.lab.tasks.fewshot import Pool, Prefetch, Shots, varied
from intention.lab.train import Plan, train

ACCURACY, BEFORE, VALIDATION = "accuracy", "accuracy before training", "validation accuracy"
UNSEEN = "accuracy on all unseen classes"  # validation and test classes together
SEEN = "accuracy on training classes"
ENOUGH = 12_000  # images of the training classes, to measure that
TESTS, CHECKS = 1_000_000, 1_500_000  # seeds of test episodes and of validation episodes begin here
BY_DISTANCE = (
    "intention",
    "intention_longer",
    "intention_ce",
    "intention_lda",
    "intention_qda",
    "intention_kernel",
)
LONG = ("maml", "intention_longer")
FEATURES = 64  # size of e_H where nothing else could learn: features, which have no encoder, and a head without weights
SHARED_READING = """
- 5 classes, 5 images of each as context and 15 as queries. Encoders, e_H, heads, optimiser (SGD, momentum 0.9, additive
  weight decay 5·10⁻⁴) and schedule (rate · 0.8^(t/T − 1) from step T on) are the paper's; T is 10,000 there and a tenth
  of all steps here, since "to convergence" gives no length.
- The weights are those of the best evaluation on the validation classes. Test episodes are the same for all models of a
  seed. Evaluation uses the running statistics of batch norm, except in MAML, which has those of the batch.
- miniImageNet at 28×28: 80 classes for training; the 20 others, sorted by name, are 10 for validation and 10 for the
  test. Names are in the order of WordNet: the validation classes are animals but one, the test classes are things, so
  they are harder to tell apart than classes drawn at random. The accuracy on all 20 is measured beside it (the step was
  chosen on 10 of them).
- α is learnable and starts at 10; the weights of e_H keep lengths at the start, whatever its size.
- e_H is linear. Where it is wider than its input (8192 from 64 features), it is computed up to a rotation, with the
  same answers and gradients (`lab/models/fewshot.Folded`).
- `standard` has convolutions in bfloat16 (the solve is not): no difference from float32 beyond noise was seen in 200
  steps.
"""
MODELS = (
    "intention",
    "attention",
    "neural_process",
    "protonet",
    "maml_first",
    "maml",
    "intention_longer",
    "pretrained",
    "intention_ce",
    "intention_kernel",
    "intention_lda",
    "intention_qda",
    "sigma_intention",
)


@dataclass(frozen=True)
class Classifier:
    """A head: the size of e_H before it (0: none), hidden layers after it, and how fast all of it learns."""

    latent: int
    learning_rate: float
    decode: tuple[int, ...] = ()
    heads: int = 1

    def __post_init__(self) -> None:
        require(self.latent >= 0, f"latent must be at least 0 (no e_H), got {self.latent}")
        require(all(size > 0 for size in self.decode), f"sizes must be positive, got {self.decode}")
        require(self.heads >= 1, f"heads must be at least 1, got {self.heads}")


@dataclass(frozen=True)
class Longer(Classifier):
    """A head that is trained `times` as long as the others, on images that are flipped and shifted at random."""

    times: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.times >= 1, f"times must be at least 1, got {self.times}")


@dataclass(frozen=True)
class MamlNet:
    """The gradient steps that encoder and linear layer take on the examples of a task."""

    learning_rate: float
    inner_steps: int = 5
    inner_rate: float = 0.01
    validation_episodes: int = 100  # fewer than others have: each takes gradient steps

    def __post_init__(self) -> None:
        require(self.validation_episodes >= 1, f"validation_episodes must be >= 1, got {self.validation_episodes}")
        require(self.inner_steps >= 0, f"inner_steps must be at least 0, got {self.inner_steps}")
        require(0 <= self.inner_rate < math.inf, f"inner_rate must be >= 0 and finite, got {self.inner_rate}")


@dataclass(frozen=True)
class Config:
    """Few-shot classification."""

    data: str = chooses("auto")  # a name, a folder of images, an npz; auto: miniImageNet if it is there, or glyphs
    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(2)
    maml_seeds: int = chooses(1)  # of second-order MAML and of the longer line, which take several times as long
    encoder: Literal["conv4", "resnet12"] = "conv4"
    width: int = 64  # channels of Conv4; of ResNet-12's first block, the others have 2, 4 and 8 times as many
    dropblock: float = 0.0
    precision: Literal["float32", "bfloat16"] = "float32"  # of the convolutions
    way: int = 5
    shot: int = 5
    queries: int = 15  # of each class
    steps: int = 100_000
    batch: int = 1  # episodes of a step
    decay_period: int = 10_000
    weight_decay: float = 5e-4
    clip: float = 0.0
    alpha: float = 10.0  # at the start
    evaluation_episodes: int = 1000
    validation_episodes: int = 500
    validations: int = 20  # during training
    intention: Classifier = Classifier(8192, 0.1)
    intention_longer: Longer = Longer(8192, 0.1)
    intention_ce: Classifier = Classifier(8192, 0.1)
    intention_lda: Classifier = Classifier(8192, 0.1)
    intention_qda: Classifier = Classifier(8192, 0.1)
    intention_kernel: Classifier = Classifier(32, 0.1)
    sigma_intention: Classifier = Classifier(512, 0.1)
    attention: Classifier = Classifier(512, 0.05, (512, 512, 512), heads=5)
    neural_process: Classifier = Classifier(2048, 0.1, (1024,))
    protonet: Classifier = Classifier(0, 0.1)
    pretrained: Classifier = Classifier(0, 0.1)
    maml_first: MamlNet = MamlNet(0.1)
    maml: MamlNet = MamlNet(0.1)

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        least = {"seeds": 1, "maml_seeds": 0, "width": 1, "way": 2, "shot": 1, "queries": 1, "validations": 1}
        for name, smallest in (least | {"evaluation_episodes": 2, "validation_episodes": 1}).items():
            require(getattr(self, name) >= smallest, f"{name} must be at least {smallest}, got {getattr(self, name)}")
        require(0 < self.alpha < math.inf, f"alpha must be > 0 and finite, got {self.alpha}")
        require(0 <= self.dropblock < 1, f"dropblock must be 0 to 1, got {self.dropblock}")
        for model in MODELS:
            self.plan(model)

    def plan(self, model: str) -> Plan:
        times = self.intention_longer.times if model == "intention_longer" else 1
        return Plan(
            self.steps * times,
            self.batch,
            getattr(self, model).learning_rate,
            "decay",
            decay_period=self.decay_period * times,
            clip=self.clip,
            evaluate_every=max(1, self.steps * times // self.validations),
            optimiser="sgd",
            weight_decay=self.weight_decay,
            keep=VALIDATION,
        )


def run(job: Job, place: Place, latent: int | None = None) -> Iterator[Measure]:
    """Train on the training classes, choose the weights on the validation classes, judge on the test classes.

    latent: the size of e_H, where it is varied.
    """
    config: Config = job.config
    pools = load(config)
    torch.manual_seed(job.seed)
    model = build(config, job.model, pools["train"], latent)
    yield judge(model, pools["test"], config, job.seed, BEFORE)
    sample = partial(pools["train"].sample, way=config.way, shot=config.shot, queries=config.queries)
    if job.model == "intention_longer" and pools["train"].x.dim() > 2:
        sample = partial(varied, sample)
    count = getattr(getattr(config, job.model), "validation_episodes", config.validation_episodes)
    check = partial(validate, pools["val"], config, count, job.seed)
    history = train(
        model,
        Prefetch(sample),
        lambda model, shots: model(shots),
        config.plan(job.model),
        seed=job.seed,
        place=place,
        evaluate=check,
    )
    for entry in history:
        yield Measure(VALIDATION, entry[VALIDATION], entry["step"])
    yield judge(model, pools["test"], config, job.seed, ACCURACY, _learnt(model, history))
    yield judge(model, together(pools["val"], pools["test"]), config, job.seed, UNSEEN)
    yield judge(model, some_of(pools["train"]), config, job.seed, SEEN)
    encoder = getattr(model, "encoder", None)
    if place.folder is not None and isinstance(encoder, encoders.Encoder):
        encoders.save_encoder(place.folder / "encoder.safetensors", encoder)


def load(config: Config) -> dict[str, Pool]:
    """Pools of disjoint classes, each large enough for the episodes."""
    found = data.load(config.data)
    parts = found.parts
    if not found.by_class or set(parts) != {"train", "val", "test"}:
        parts = data.split_classes(parts["train"])
    pools = {name: Pool(part.x, part.y, f"{found.name} ({name} classes)") for name, part in parts.items()}
    for pool in pools.values():
        pool.check(config.way, config.shot, config.queries)
    return pools


def together(one: Pool, other: Pool) -> Pool:
    """The classes of both."""
    return Pool(torch.cat([one.x, other.x]), torch.cat([one.y, other.y + len(one.sizes)]), other.name)


def some_of(pool: Pool) -> Pool:
    """Every so many images of a large pool."""
    every = max(1, len(pool.x) // ENOUGH)
    return Pool(pool.x[::every], pool.y[::every], pool.name)


def build(config: Config, model: str, pool: Pool, latent: int | None = None) -> nn.Module:
    net: Any = getattr(config, model)
    encoder, d = _encoder(config, pool.x, running=not model.startswith("maml"))
    if model.startswith("maml"):
        return fewshot.ImageMaml(encoder, d, config.way, net.inner_steps, net.inner_rate, model == "maml")
    latent = int(net.latent) if latent is None else latent
    if model == "protonet" and encoder is None:
        latent = latent or FEATURES
    if model == "pretrained":
        return fewshot.Pretrained(encoder, d, latent, len(pool.sizes), config.alpha)
    heads: Mapping[str, Any] = {
        "intention": partial(fewshot.LsSvm, config.alpha, "mse"),
        "intention_longer": partial(fewshot.LsSvm, config.alpha, "mse"),
        "intention_ce": partial(fewshot.LsSvm, config.alpha, "cross-entropy"),
        "intention_kernel": partial(_kernel_head, config.alpha, latent or d),
        "intention_lda": partial(fewshot.Discriminant, config.alpha, quadratic=False),
        "intention_qda": partial(fewshot.Discriminant, config.alpha, quadratic=True),
        "sigma_intention": partial(fewshot.SigmaVote, config.alpha),
        "attention": partial(fewshot.Attention, latent or d, config.way, net.decode, net.heads),
        "neural_process": partial(fewshot.ClassProcess, latent or d, config.way, net.decode),
        "protonet": fewshot.Prototypes,
    }
    loss = "mse" if model in ("intention", "intention_longer", "intention_kernel") else "cross-entropy"
    built = fewshot.FewShot(encoder, d, latent, heads[model](), loss, model in BY_DISTANCE)
    if model == "attention":
        fewshot.start_as_in_jax(built.embed, built.head)
    return built


def _kernel_head(alpha: float, d: int) -> nn.Module:
    return fewshot.LsSvm(alpha, "mse", kernels.Gaussian(1 / d, learnable=True))


def _encoder(config: Config, x: Tensor, running: bool) -> tuple[encoders.Encoder | None, int]:
    """None for features."""
    if x.dim() == 2:
        return None, x.shape[1]
    more: dict[str, Any] = {"running": running} if config.encoder == "conv4" else {"dropblock": config.dropblock}
    built = encoders.build(config.encoder, x.shape[1], x.shape[-1], config.width, config.precision, **more)
    return built, built.d


def validate(pool: Pool, config: Config, episodes: int, seed: int, model: nn.Module) -> dict[str, float]:
    right = correct(model, pool, config, episodes, CHECKS + seed)
    return {VALIDATION: float(right.mean())}


@torch.no_grad()
def judge(
    model: nn.Module, pool: Pool, config: Config, seed: int, metric: str, about: dict[str, Any] | None = None
) -> Measure:
    """Mean and interval over test episodes; these are the same for all models of a seed."""
    model.eval()
    right = correct(model, pool, config, config.evaluation_episodes, TESTS + seed)
    model.train()
    return over_tasks(metric, right, about or {})


def correct(model: nn.Module, pool: Pool, config: Config, episodes: int, seed: int, part: int = 10) -> Tensor:
    """The share of right answers of each episode. Images are encoded once, for all episodes, where that is the same."""
    scores = getattr(model, "scores")  # noqa: B009 (a module's attribute of any type)
    if isinstance(model, fewshot.FewShot):
        pool = Pool(torch.cat([model.encode(x) for x in pool.x.split(500)]), pool.y, pool.name)
        scores = lambda shots: model.answer(shots.x, shots.value)  # noqa: E731
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in [part] * (episodes // part) + [episodes % part] * (episodes % part > 0):
        shots: Shots = pool.sample(size, generator, way=config.way, shot=config.shot, queries=config.queries)
        found.append((scores(shots).argmax(-1) == shots.labels).float().mean(-1))
    return torch.cat(found)


def _learnt(model: nn.Module, history: list[dict[str, float]]) -> dict[str, Any]:
    """What there is to say of a trained model besides its accuracy."""
    best = max(entry[VALIDATION] for entry in history)
    about: dict[str, Any] = {
        "chosen step": max(int(entry["step"]) for entry in history if entry[VALIDATION] == best),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    names = {"theta": "alpha", "log_gamma": "gamma", "sharpness": "sharpness"}  # all of them are logarithms
    for name, weight in model.named_parameters():
        if name.split(".")[-1] in names:
            about[names[name.split(".")[-1]]] = round(float(weight.detach().exp()), 5)
    return about
