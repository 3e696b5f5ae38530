"""What the few-shot experiments share: how a classifier is built, trained and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intention import kernels
from intention.fewshot import encoders, heads
from intention.fewshot.files import load_encoder, save_encoder
from intention.fewshot.images import with_channels
from intention.lab import data
from intention.lab.core.device import moved
from intention.lab.core.device import of as device_of
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Json
from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure
from intention.lab.experiments.episodes import over_tasks
from intention.lab.experiments.fewshot import model as fewshot
from intention.lab.experiments.fewshot.config import (
    ACCURACY,
    BEFORE,
    BY_DISTANCE,
    ERROR,
    HALVES,
    SEEN,
    UNSEEN,
    VALIDATION,
    Config,
)
from intention.lab.experiments.fewshot.task import Pool, Prefetch, Shots, varied
from intention.nn import LearnableAlpha

__all__ = ["build", "correct", "encoded", "halves", "load", "run", "shared_encoder", "together"]

ENOUGH = 12_000  # images of the training classes, to measure that
TESTS, CHECKS = 1_000_000, 1_500_000  # seeds of test episodes and of validation episodes begin here
HALF, SPLITS = 1_700_000, 20  # seeds of random halves begin here, and how many there are
FEATURES = 64  # size of e_H where nothing else could learn: features, which have no encoder, and a head without weights


def run(job: Job, place: Place, latent: int | None = None) -> Iterator[Measure]:
    """Train on the training classes, choose the weights on the validation classes, judge on the test classes.

    latent: the size of e_H, where it is varied.
    """
    config: Config = job.config
    pools = load(config)
    net = getattr(config, job.model)
    shared = None
    if hasattr(net, "start") and pools["train"].x.dim() > 2:
        shared = shared_encoder(config, net.start, job.seed)
        channels = shared.channels
        pools = {name: Pool(with_channels(pool.x, channels), pool.y, pool.name) for name, pool in pools.items()}
    if getattr(net, "frozen", False):
        pools = encoded(pools, shared, net.mirrored)
    torch.manual_seed(job.seed)
    model = build(config, job.model, pools["train"], latent, job.seed)
    yield judge(model, pools["test"], config, job.seed, BEFORE)
    sample = partial(pools["train"].sample, way=config.way, shot=config.shot, queries=config.queries)
    shift = getattr(net, "shift", -1)
    if shift >= 0 and pools["train"].x.dim() > 2:
        sample = partial(varied, sample, most=shift)
    count = getattr(net, "validation_episodes", config.validation_episodes)
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
    yield Measure(ERROR, 1 - history[-1][VALIDATION])
    yield judge(model, pools["test"], config, job.seed, ACCURACY, _learnt(model, history, config.plan(job.model).keep))
    unseen = together(pools["val"], pools["test"])
    yield judge(model, unseen, config, job.seed, UNSEEN)
    yield from halves(model, unseen, config)
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


def build(config: Config, model: str, pool: Pool, latent: int | None = None, seed: int = 0) -> nn.Module:
    net: Any = getattr(config, model)
    alpha: float = getattr(net, "alpha", 0.0) or config.alpha
    model = model.removesuffix("_tuned")
    running = not model.startswith("maml")
    if hasattr(net, "start") and pool.x.dim() > 2:
        encoder: encoders.Encoder | None = shared_encoder(config, net.start, seed, running)
        d = encoder.d
    else:
        encoder, d = _encoder(config, pool.x, running, getattr(net, "round_up", False))
    if model.startswith("maml"):
        maml = fewshot.ImageMaml(encoder, d, config.way, net.inner_steps, net.inner_rate, model == "maml")
        maml.mirrored = getattr(net, "mirrored", False)
        return maml
    latent = int(net.latent) if latent is None else latent
    if model == "protonet" and encoder is None:
        latent = latent or FEATURES
    if model == "pretrained":
        return fewshot.Pretrained(encoder, d, latent, len(pool.sizes), alpha)
    found: Mapping[str, Callable[[], nn.Module]] = {
        "intention": partial(heads.LsSvm, LearnableAlpha(alpha)),
        "intention_longer": partial(heads.LsSvm, LearnableAlpha(alpha)),
        "intention_ce": partial(heads.LsSvm, LearnableAlpha(alpha), fewshot.SHARPNESS),
        "intention_kernel": partial(_kernel_head, alpha, latent or d),
        "intention_lda": partial(heads.LDA, LearnableAlpha(alpha)),
        "intention_qda": partial(heads.QDA, LearnableAlpha(alpha)),
        "sigma_intention": partial(_sigma_head, alpha, config.way, net, latent or d),
        "attention": partial(fewshot.attention, latent or d, config.way, net.decode, net.heads),
        "neural_process": partial(heads.Process, latent or d, config.way, net.decode),
        "protonet": heads.Prototypes,
    }
    loss = "mse" if model in ("intention", "intention_longer", "intention_kernel") else "cross-entropy"
    tasks = getattr(net, "tasks", 0)
    kind = partial(fewshot.Mixed, tasks) if tasks else fewshot.FewShot
    built = kind(encoder, d, latent, found[model](), loss, model in BY_DISTANCE)
    built.mirrored = getattr(net, "mirrored", False)
    if model == "attention" or (model == "sigma_intention" and net.heads > 1):
        fewshot.start_as_in_jax(built.embed, built.head)
    return built


def shared_encoder(config: Config, start: str, seed: int, running: bool = True) -> encoders.Encoder:
    """The encoder that all heads begin with, of this precision; without running statistics for MAML."""
    try:
        found = load_encoder(start.format(seed=seed))
    except (FileNotFoundError, ValueError) as error:
        raise LabError(f"{error}; tools/encoder.py trains one: --help") from error
    if found.kind != config.encoder:
        raise LabError(
            f"{start} is a {found.kind}, and this config has encoder {config.encoder}: choose another --start"
        )
    sizes = (found.kind, found.size, found.channels, found.width, config.precision)
    built = encoders.build(*sizes, running=running, round_up=found.round_up, dropblock=config.dropblock)
    known = built.state_dict()
    built.load_state_dict({name: tensor for name, tensor in found.state_dict().items() if name in known})
    return built


@torch.no_grad()
def encoded(pools: Mapping[str, Pool], encoder: encoders.Encoder | None, mirrored: bool = False) -> dict[str, Pool]:
    """The same pools of features: centred on those of training, each of length sqrt(d).

    encoder: None where they are features.
    mirrored: of validation and test images the mean with their mirror images is taken.
    """
    found = {name: pool.x for name, pool in pools.items()}
    if encoder is not None:
        encoder.eval()
        found = {
            name: torch.cat([fewshot.features_of(encoder, x, mirrored and name != "train") for x in all.split(500)])
            for name, all in found.items()
        }
    mean = found["train"].mean(0)
    size = found["train"].shape[1] ** 0.5
    return {
        name: Pool(size * nn.functional.normalize(x - mean, dim=-1), pools[name].y, pools[name].name)
        for name, x in found.items()
    }


def _sigma_head(alpha: float, way: int, net: Any, latent: int) -> nn.Module:
    """With one head softmax(Q Sigma^-1 K') of labels, as printed; with more, all that attention has."""
    if net.heads == 1:
        return heads.SigmaIntention(LearnableAlpha(alpha), fewshot.SHARPNESS)
    return fewshot.attention(latent, way, net.decode, net.heads, LearnableAlpha(alpha))


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
    return over_tasks(metric, right, {**(about or {}), **_each(right, config)})


def _each(right: Tensor, config: Config) -> Json:
    """How many answers of each episode were right, two hexadecimal digits each: models of a seed can be paired."""
    queries = config.way * config.queries
    if queries > 255:
        return {}
    return {"queries": queries, "right": bytes((queries * right).round().int().tolist()).hex()}


@torch.no_grad()
def halves(model: nn.Module, pool: Pool, config: Config) -> Iterator[Measure]:
    """Mean and spread over random halves of the unseen classes, the same for all models and seeds; which half is "test"
    is not printed. Nothing where a half has fewer classes than an episode."""
    count = len(pool.sizes)
    if count // 2 < config.way:
        return
    model.eval()
    pool, scores = _answers(model, pool)
    found = []
    for number in range(SPLITS):
        generator = torch.Generator().manual_seed(HALF + number)
        chosen = torch.isin(pool.y, torch.randperm(count, generator=generator)[: count // 2])
        half = Pool(pool.x[chosen], pool.y[chosen].unique(return_inverse=True)[1], pool.name)
        right = _correct(scores, half, config, max(1, config.evaluation_episodes // 10), HALF + number)
        found.append(float(right.mean()))
    model.train()
    known = torch.tensor(found)
    about = {"splits": [round(one, 4) for one in found], "spread": round(float(known.std()), 4)}
    yield Measure(HALVES, float(known.mean()), data=about)


Scores = Callable[[Shots], Tensor]


def correct(model: nn.Module, pool: Pool, config: Config, episodes: int, seed: int, part: int = 10) -> Tensor:
    """The share of right answers of each episode."""
    pool, scores = _answers(model, pool)
    return _correct(scores, pool, config, episodes, seed, part)


def _answers(model: nn.Module, pool: Pool) -> tuple[Pool, Scores]:
    """What answers episodes of a pool. Images are encoded once, for all episodes, where that is the same."""
    device = device_of(model)
    if isinstance(model, fewshot.FewShot):
        features = torch.cat([model.encode(x.to(device)) for x in pool.x.split(500)])
        return Pool(features.cpu(), pool.y, pool.name), lambda shots: model.answer(*_there(shots, device)).cpu()
    scores = getattr(model, "scores")  # noqa: B009 (a module's attribute of any type)
    return pool, lambda shots: scores(moved(shots, device)).cpu()


def _there(shots: Shots, device: torch.device) -> tuple[Tensor, Tensor]:
    return shots.x.to(device), shots.value.to(device)


def _correct(scores: Scores, pool: Pool, config: Config, episodes: int, seed: int, part: int = 10) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in [part] * (episodes // part) + [episodes % part] * (episodes % part > 0):
        shots: Shots = pool.sample(size, generator, way=config.way, shot=config.shot, queries=config.queries)
        found.append((scores(shots).argmax(-1) == shots.labels).float().mean(-1))
    return torch.cat(found)


def _learnt(model: nn.Module, history: list[dict[str, float]], keep: str) -> Json:
    """What there is to say of a trained model besides its accuracy."""
    best = max(entry[VALIDATION] for entry in history)
    chosen = max(int(entry["step"]) for entry in history if entry[VALIDATION] == best)
    about: Json = {
        "chosen step": chosen if keep else int(history[-1]["step"]),
        "parameters": sum(weight.numel() for weight in model.parameters()),
    }
    names = {"theta": "alpha", "log_gamma": "gamma", "sharpness": "sharpness"}  # all of them are logarithms
    for name, weight in model.named_parameters():
        if name.split(".")[-1] in names:
            about[names[name.split(".")[-1]]] = round(float(weight.detach().exp()), 5)
    return about
