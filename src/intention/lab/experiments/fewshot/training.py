"""What the few-shot experiments share: how a classifier is built, trained and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intention import kernels
from intention.fewshot import encoders, heads
from intention.fewshot.files import save_encoder
from intention.lab import data
from intention.lab.core.place import Place
from intention.lab.core.results import Json
from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure
from intention.lab.experiments.episodes import over_tasks
from intention.lab.experiments.fewshot import model as fewshot
from intention.lab.experiments.fewshot.config import ACCURACY, BEFORE, BY_DISTANCE, SEEN, UNSEEN, VALIDATION, Config
from intention.lab.experiments.fewshot.task import Pool, Prefetch, Shots, varied
from intention.nn import LearnableAlpha

ENOUGH = 12_000  # images of the training classes, to measure that
TESTS, CHECKS = 1_000_000, 1_500_000  # seeds of test episodes and of validation episodes begin here
FEATURES = 64  # size of e_H where nothing else could learn: features, which have no encoder, and a head without weights


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
    shift = getattr(getattr(config, job.model), "shift", -1)
    if shift >= 0 and pools["train"].x.dim() > 2:
        sample = partial(varied, sample, most=shift)
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
        save_encoder(place.folder / "encoder.safetensors", encoder)


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
    encoder, d = _encoder(config, pool.x, not model.startswith("maml"), getattr(net, "round_up", False))
    if model.startswith("maml"):
        return fewshot.ImageMaml(encoder, d, config.way, net.inner_steps, net.inner_rate, model == "maml")
    latent = int(net.latent) if latent is None else latent
    if model == "protonet" and encoder is None:
        latent = latent or FEATURES
    if model == "pretrained":
        return fewshot.Pretrained(encoder, d, latent, len(pool.sizes), config.alpha)
    found: Mapping[str, Callable[[], nn.Module]] = {
        "intention": partial(heads.LsSvm, LearnableAlpha(config.alpha)),
        "intention_longer": partial(heads.LsSvm, LearnableAlpha(config.alpha)),
        "intention_ce": partial(heads.LsSvm, LearnableAlpha(config.alpha), fewshot.SHARPNESS),
        "intention_kernel": partial(_kernel_head, config.alpha, latent or d),
        "intention_lda": partial(heads.LDA, LearnableAlpha(config.alpha)),
        "intention_qda": partial(heads.QDA, LearnableAlpha(config.alpha)),
        "sigma_intention": partial(heads.SigmaIntention, LearnableAlpha(config.alpha), fewshot.SHARPNESS),
        "attention": partial(fewshot.attention, latent or d, config.way, net.decode, net.heads),
        "neural_process": partial(heads.Process, latent or d, config.way, net.decode),
        "protonet": heads.Prototypes,
    }
    loss = "mse" if model in ("intention", "intention_longer", "intention_kernel") else "cross-entropy"
    tasks = getattr(net, "tasks", 0)
    kind = partial(fewshot.Mixed, tasks) if tasks else fewshot.FewShot
    built = kind(encoder, d, latent, found[model](), loss, model in BY_DISTANCE)
    if model == "attention":
        fewshot.start_as_in_jax(built.embed, built.head)
    return built


def _kernel_head(alpha: float, d: int) -> nn.Module:
    return heads.Kernel(kernels.Gaussian(1 / d, learnable=True), LearnableAlpha(alpha))


def _encoder(config: Config, x: Tensor, running: bool, round_up: bool) -> tuple[encoders.Encoder | None, int]:
    """None for features."""
    if x.dim() == 2:
        return None, x.shape[1]
    built = encoders.build(
        config.encoder,
        *(x.shape[1], x.shape[-1], config.width, config.precision),
        running=running,
        round_up=round_up,
        dropblock=config.dropblock,
    )
    return built, built.d


def validate(pool: Pool, config: Config, episodes: int, seed: int, model: nn.Module) -> dict[str, float]:
    right = correct(model, pool, config, episodes, CHECKS + seed)
    return {VALIDATION: float(right.mean())}


@torch.no_grad()
def judge(model: nn.Module, pool: Pool, config: Config, seed: int, metric: str, about: Json | None = None) -> Measure:
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


def _learnt(model: nn.Module, history: list[dict[str, float]]) -> Json:
    """What there is to say of a trained model besides its accuracy."""
    best = max(entry[VALIDATION] for entry in history)
    about: Json = {
        "chosen step": max(int(entry["step"]) for entry in history if entry[VALIDATION] == best),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    names = {"theta": "alpha", "log_gamma": "gamma", "sharpness": "sharpness"}  # all of them are logarithms
    for name, weight in model.named_parameters():
        if name.split(".")[-1] in names:
            about[names[name.split(".")[-1]]] = round(float(weight.detach().exp()), 5)
    return about
