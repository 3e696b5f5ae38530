"""The hyperparameters of the experiments on images that are code, measured; their fields: test_hyperparameters.py."""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from intention.fewshot.encoders import Conv4, ResNet12
from intention.lab import data
from intention.lab.data import images, named
from intention.lab.data.arrays import write_npz
from intention.lab.experiments import anomaly, fewshot, fewshot_latent, fewshot_resnet, pixels, sine
from intention.lab.experiments.anomaly import task as anomaly_task
from intention.lab.experiments.base import data_name
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot.task import Pool
from intention.lab.experiments.pixels import task as pixels_task
from intention.lab.paper.hyperparameters import ROWS
from intention.lab.paper.lines import Row
from lab.paper.checks import IMAGES, activation, generator, loss, name_of, optimiser, plans, sizes, stepped

CODE = [row for row in ROWS if not row.path and row.experiment in IMAGES]
SHOTS: dict[str, Any] = {"fewshot": fewshot, "fewshot_resnet": fewshot_resnet, "fewshot_latent": fewshot_latent}
nnf = nn.functional


# --- pixels -----------------------------------------------------------------------------------------------------------


def pixels_queries() -> str:
    paper = pixels.PRESETS["paper"]
    shown = torch.randint(256, (3, 784), dtype=torch.uint8, generator=generator())
    query = pixels_task.sample(shown, 2, generator(), points=paper.points, queries=paper.queries).query
    return "all pixels" if query.flatten().sort().values.tolist() == list(range(784)) else "some"


def pixels_models() -> str:
    """The same layers but for what the first ones read; MAML's inner rate has a row of its own."""
    ours, theirs = pixels.PRESETS["paper"], sine.PRESETS["paper"]
    theirs = replace(theirs, maml=replace(theirs.maml, inner_rate=ours.maml.inner_rate))
    for model in theirs.models:
        assert getattr(ours, model) == getattr(theirs, model), model
        shapes = [sorted(sizes(net)) for net in (pixels.build(ours, model), sine.build(theirs, model))]
        assert shapes[0] == shapes[1], model
    return "those of the sine regression" if set(ours.models) == set(theirs.models) else "others"


def pixels_positions() -> str:
    """What the models read of a pixel: its row and column, and waves of both."""
    paper = pixels.PRESETS["paper"]
    codes: Any = pixels.build(paper, "attention").codes
    row, column = (2 * torch.tensor([9.5, 13.5]) / 28 - 1).tolist()  # of the pixel 9 * 28 + 13
    angles = [math.pi * f * u for u in (row, column) for f in paper.frequencies]
    expected = [row, column, *map(math.sin, angles), *map(math.cos, angles)]
    found = codes[9 * 28 + 13].tolist()
    return "positional encoding" if found == pytest.approx(expected, abs=1e-5) else "another"


# --- few shots --------------------------------------------------------------------------------------------------------


@lru_cache
def mini_imagenet() -> dict[str, Any]:
    """What an experiment gets from a made-up miniImageNet: 100 black sheets in the usual parts."""
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTENTION_DATA", place)
        patch.setattr(named, "_load", named._load.__wrapped__)  # not to be kept
        sheet = Path(place) / "black.webp"
        images.write_sheet(sheet, np.zeros((600, 28, 28, 3), np.uint8))
        for number in range(100):
            part = "train" if number < 64 else "val" if number < 80 else "test"
            file = Path(place) / "miniimagenet28" / part / f"n{number:08}.webp"
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(sheet, file)
        job = next(iter(fewshot.jobs(fewshot.PRESETS["paper"])))
        pools = fewshot_runs.load(job.config)
    return {
        "classes": tuple(len(pools[part].sizes) for part in ("train", "val", "test")),
        "size": {tuple(pool.x.shape[1:3]) for pool in pools.values()},
        "each": {int(size) for pool in pools.values() for size in pool.sizes},
    }


def only(found: set[Any]) -> Any:
    return found.pop() if len(found) == 1 else found


def features() -> Pool:
    """As many numbers as Matching Nets' encoder gives."""
    return Pool(torch.randn(100, 64, generator=generator()), torch.arange(100) % 5)


def photos() -> Pool:
    return Pool(torch.zeros(10, 28, 28, 3, dtype=torch.uint8), torch.arange(10) % 5)


def built(model: str, experiment: Any = fewshot, pool: Pool | None = None, latent: int | None = None) -> Any:
    torch.manual_seed(0)
    return fewshot_runs.build(experiment.PRESETS["paper"], model, pool or features(), latent)


def encoder(experiment: Any, model: str = "intention") -> str:
    """Matching Nets: four times 64 channels, batch norm, ReLU, pooling. ResNet12: four blocks of three and a mean."""
    net = built(model, experiment, photos()).encoder
    convolutions = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)]
    widths = [layer.out_channels for layer in convolutions]
    if isinstance(net, Conv4) and widths == [64] * 4 and net.d == 64:
        return "Matching Nets"
    return "ResNet12" if isinstance(net, ResNet12) and len(widths) == 12 and net.d == widths[-1] else "another"


def loss_of_shots(*models: str) -> str:
    def name(model: str) -> str:
        net, pool = built(model), features()
        shots = pool.sample(2, generator(), way=5, shot=5, queries=3)
        with torch.no_grad():
            found, scores = net(shots), net.scores(shots)
        signs = 2 * nnf.one_hot(shots.labels, 5) - 1.0
        names = {
            "MSE": nnf.mse_loss(scores, signs),
            "softmax cross-entropy": -scores.log_softmax(-1).gather(-1, shots.labels[..., None]).mean(),
        }
        return next((name for name, value in names.items() if torch.allclose(found, value)), "another")

    return only({name(model) for model in models})


def momentum(experiment: Any) -> float:
    groups = [stepped(fewshot_runs, plan).param_groups[0] for plan in plans(experiment)]
    paper = experiment.PRESETS["paper"]
    assert all(one["weight_decay"] == paper.weight_decay and not one["nesterov"] for one in groups)
    return only({one["momentum"] for one in groups})


def schedule(experiment: Any) -> str:
    """Over equal times the rate falls by equal factors, once it falls: of all models but our own longer line."""
    paper = experiment.PRESETS["paper"]
    for plan in (paper.plan(model) for model in paper.models if model != "intention_longer"):
        rates = [plan.rate(step) for step in range(plan.decay_period + 2_000, plan.decay_period + 50_000, 4_000)]
        factors = {round(b / a, 9) for a, b in itertools.pairwise(rates)}
        if len(factors) != 1 or not 0 < only(factors) < 1:
            return "another"
    return "exponential"


def decay_rate(experiment: Any, model: str) -> float:
    plan = experiment.PRESETS["paper"].plan(model)
    return round(plan.rate(20_000) / plan.rate(10_000), 9)


def decay_start(experiment: Any, model: str) -> int:
    plan = experiment.PRESETS["paper"].plan(model)
    return max(step for step in range(30_000) if plan.rate(step) == plan.learning_rate)


def shared_by_attention() -> str:
    """What the layer after the encoder embeds: the 25 images of the context, the 15 queries, the 25 labels."""
    net, seen = built("attention"), []
    net.embed.register_forward_hook(lambda layer, inputs, out: seen.append(inputs[0].shape[1]))
    net.scores(features().sample(1, generator(), way=5, shot=5, queries=3))
    assert sizes(net.head.embed_value)[-1] == net.embed.out_features  # V has such a layer, its own
    return "K, Q" if seen == [25 + 15] else "another"


def e_v_of_attention() -> tuple[int, ...]:
    return sizes(built("attention").head.embed_value)[:-1]  # the last is e_H


def e_v_of_process() -> str:
    """No layer reads the labels of an image."""
    linear = [layer for layer in built("neural_process").modules() if isinstance(layer, nn.Linear)]
    return "none" if all(layer.in_features != 5 for layer in linear) else "some"


def e_p_of_process() -> tuple[int, ...]:
    head = built("neural_process").head
    assert head.from_query.out_features == head.from_context.out_features
    return (head.from_query.out_features, *sizes(head.decode))


def mean_of_process() -> str:
    """Images may be put in the place of one another within a class, and not across."""
    head = built("neural_process", latent=7).head.double()
    query, key = (torch.randn(1, n, 7, generator=generator(), dtype=torch.float64) for n in (3, 10))
    labels = torch.arange(10) % 5
    means = torch.stack([key[:, labels == one].mean(1) for one in range(5)], 1)
    same = torch.allclose(head(key, labels, query), head(means[:, labels], labels, query))
    everywhere = torch.allclose(head(key, labels, query), head(key.flip(1), labels, query))
    return "each class" if same and not everywhere else "another"


def shots_nets() -> list[nn.Module]:
    return [built(model, pool=photos()) for model in ("intention", "attention", "neural_process")]


def kernel_of_shots() -> str:
    kernel, (x, y) = built("intention_kernel", fewshot_resnet).head.solve.kernel, points(32)
    expected = (-torch.cdist(x, y).square() / 32).exp()  # and so is its gamma
    return "exp(−γ|x − y|²)" if torch.allclose(kernel(x, y), expected, atol=1e-5) else "another"


def gamma_of_shots() -> str:
    """By the kernel of two points at distance 1."""
    x = torch.zeros(1, 1, 16)
    for latent in (16, 128):
        kernel = built("intention_kernel", fewshot_resnet, latent=latent).head.solve.kernel
        assert any(one.requires_grad for one in kernel.parameters())
        if not torch.allclose(-kernel(x, x + 0.25).log() * latent, torch.ones(1)):
            return "another"
    return "1 / size of e_H"


def points(d: int) -> tuple[Tensor, Tensor]:
    return torch.randn(7, d, generator=generator()), torch.randn(11, d, generator=generator())


def covariance_of_shots() -> str:
    """With one covariance the differences of scores are linear in the query; with one per class they bend."""

    def bends(model: str) -> bool:
        head = built(model, fewshot_resnet, latent=3).head.double()
        key = torch.randn(1, 25, 3, generator=generator(), dtype=torch.float64)
        labels = torch.arange(5).repeat_interleave(5)
        line = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)[None, :, None] * torch.ones(3)
        scores = head(key, labels, line).diff(dim=-1)
        return bool(scores.diff(n=2, dim=1).abs().max() > 1e-9)

    models = fewshot_resnet.PRESETS["paper"].models
    found = [bends(model) for model in ("intention_lda", "intention_qda") if model in models]
    return "pooled, and one per class" if found == [False, True] else "another"


def kernels_of_latent() -> tuple[str, ...]:
    nets = [built(model, fewshot_latent, latent=16) for model in fewshot_latent.PRESETS["paper"].models]
    return tuple("linear" if net.head.solve.kernel is None else type(net.head.solve.kernel).__name__ for net in nets)


FEW_SHOT: dict[str, Callable[[], Any]] = {
    "fewshot: classes for training, validation and test": lambda: mini_imagenet()["classes"],
    "fewshot: image size": lambda: only(set(mini_imagenet()["size"])),
    "fewshot: images per class": lambda: only(set(mini_imagenet()["each"])),
    "fewshot: loss of Intention": lambda: loss_of_shots("intention", "intention_kernel"),
    "fewshot: loss of Neural Process and Attention": lambda: loss_of_shots("neural_process", "attention"),
    "fewshot: Intention: encoders": lambda: (encoder(fewshot), encoder(fewshot_resnet)),
    "fewshot: Attention: encoder": lambda: encoder(fewshot, "attention"),
    "fewshot: Attention: e_H is shared by": shared_by_attention,
    "fewshot: Attention: e_V": e_v_of_attention,
    "fewshot: Attention: e_P": lambda: sizes(built("attention").head.decode),
    "fewshot: Neural Process: encoder": lambda: encoder(fewshot, "neural_process"),
    "fewshot: Neural Process: e_V": e_v_of_process,
    "fewshot: Neural Process: e_P": e_p_of_process,
    "fewshot: Neural Process: mean over": mean_of_process,
    "fewshot: non-linearity": lambda: activation(*shots_nets()),
    "fewshot_resnet: encoder": lambda: encoder(fewshot_resnet),
    "fewshot_resnet: kernel": kernel_of_shots,
    "fewshot_resnet: γ at the start": gamma_of_shots,
    "fewshot_resnet: QDA: covariance": covariance_of_shots,
    "fewshot_latent: kernels": kernels_of_latent,
}
for name, experiment in SHOTS.items():
    FEW_SHOT[f"{name}: optimiser"] = optimiser(experiment, fewshot_runs)
    FEW_SHOT[f"{name}: momentum"] = partial(momentum, experiment)
    FEW_SHOT[f"{name}: schedule"] = partial(schedule, experiment)
DECAYED = {
    "fewshot": {"Intention": "intention", "Attention": "attention", "Neural Process": "neural_process"},
    "fewshot_resnet": {"Intention": "intention", "Intention-kernel": "intention_kernel"},
}
for name, models in DECAYED.items():
    for words, model in models.items():
        FEW_SHOT[f"{name}: {words}: decay rate"] = partial(decay_rate, SHOTS[name], model)
        FEW_SHOT[f"{name}: {words}: start of the decay"] = partial(decay_start, SHOTS[name], model)


# --- anomaly ----------------------------------------------------------------------------------------------------------


def former(model: str = "intention", layers: int = 1) -> Any:
    return anomaly.PRESETS["paper"].build(model, 512, layers)


def layer_of(model: str = "intention") -> Any:
    return former(model).former.layers[0]


@lru_cache
def cifar() -> anomaly_task.Split:
    """The paper's split of 100 classes with 500 and 100 images each; a feature is its class, as a place on a circle."""
    names = tuple(map(str, range(100)))

    def part(each: int) -> data.Labelled:
        y = torch.arange(100).repeat_interleave(each)
        angle = y * (2 * math.pi / 100)
        return data.Labelled(torch.stack([angle.cos(), angle.sin()], -1), y, names)

    whole = data.Data("cifar", {"train": part(500), "test": part(100)}, False)
    return anomaly_task.split(whole, 0, dims=2, items=anomaly.PRESETS["paper"].items)


def split_over() -> str:
    """No place on the circle is in both."""
    seen, unseen = ({tuple(one) for one in (x.x * 1000).round().tolist()} for x in (cifar().train, cifar().unseen))
    return "labels" if not seen & unseen and len(seen) + len(unseen) == 100 else "images"


def items_of_sets() -> tuple[int, int]:
    sets = anomaly_task.sample(cifar().train, 50, generator(), items=anomaly.PRESETS["paper"].items)
    odd = sets.items.take_along_dim(sets.outlier[:, None, None], 1)
    others = (torch.cdist(sets.items, odd) > 1e-3).sum(1).flatten()  # all but the outlier
    return sets.items.shape[1], only({sets.items.shape[1] - int(one) for one in others})


def features_of_anomaly() -> str:
    """By the name of what is chosen if it is there."""
    y = np.arange(900) % 100
    x = np.random.default_rng(0).normal(size=(900, 3)).astype(np.float16)
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("INTENTION_DATA", place)
        write_npz(Path(place) / named.PLACES["cifar100-features"], train_x=x, train_y=y, test_x=x, test_y=y)
        chosen = {job.config.data for job in anomaly.jobs(anomaly.PRESETS["paper"])}
    known = {"CIFAR-100, features of a MobileNetV2": "MobileNetV2, pre-trained on ImageNet, frozen"}
    return known.get(data_name(only(chosen)), "another")


def epochs() -> int:
    paper = anomaly.PRESETS["paper"]
    return round(paper.steps * paper.batch / len(cifar().train.x))


def warm_cosine() -> str:
    """The rate rises in a line to its value, then falls along a cosine."""
    plan = anomaly.PRESETS["paper"].plan()
    steps = range(0, plan.steps, 97)
    expected = [
        plan.learning_rate * min(1, (t + 1) / 100) * (1 + math.cos(math.pi * t / plan.steps)) / 2 for t in steps
    ]
    return "cosine warmup" if [plan.rate(t) for t in steps] == pytest.approx(expected) else "another"


def warmup() -> int:
    plan = anomaly.PRESETS["paper"].plan()
    return max(range(1000), key=plan.rate) + 1


def loss_of_sets() -> str:
    class Constant(nn.Module):
        def forward(self, items: Tensor) -> Tensor:
            return logits

    logits, outlier = torch.randn(7, 10, generator=generator()), torch.arange(7)
    found = anomaly._loss(Constant(), anomaly_task.Sets(logits, outlier))
    same = torch.allclose(found, -logits.log_softmax(-1)[outlier, outlier].mean())
    return "softmax cross-entropy" if same else "another"


def alpha_of_formers() -> str:
    """One learnable number per head, through a sigmoid, as the weight of I."""
    for model in ("intention", "sigma_intention"):
        mixer = layer_of(model).self_attn
        assert mixer.covariance == "convex"
        with torch.no_grad():
            mixer.alpha.theta.copy_(torch.tensor([-2.0, -1.0, 0.0, 3.0]))
        if not torch.allclose(mixer.alpha(), mixer.alpha.theta.sigmoid()):
            return "another"
    return "sigmoid(θ)"


def scale_of_map(model: str) -> str:
    """By the map, with queries and keys as the mixer makes them."""
    mixer = layer_of(model).self_attn.eval()
    x = torch.randn(1, 5, 1024, generator=generator())
    query, key, _ = nnf.linear(x, mixer.in_proj_weight, mixer.in_proj_bias).chunk(3, -1)
    query, key = (one.unflatten(-1, (4, 256)).transpose(1, 2) for one in (query, key))
    found = mixer(x, x, x, average_attn_weights=False)[1]
    if model == "attention":
        return "1 / √d" if torch.allclose(found, (query @ key.mT / 16).softmax(-1), atol=1e-5) else "another"
    return "1 / √(d N)" if torch.allclose(found, query @ key.mT / (16 * 5**0.5), atol=1e-5) else "another"


def scale_of_intention(model: str) -> str:
    wanted = {"intention": "output", "sigma_intention": "variance"}[model]
    return "by d and N" if layer_of(model).self_attn.scale == wanted else "another"


def e_x() -> tuple[int, ...]:
    """One for all heads; what the mixer reads is not negative."""
    layer, read = layer_of(), []
    layer.self_attn.register_forward_pre_hook(lambda mixer, args: read.append(args[0]))
    layer(torch.randn(2, 5, 1024, generator=generator()))
    assert read[0].min() == 0
    return sizes(layer.embed_input)


def per_head() -> tuple[int, ...]:
    """e_K, e_V and e_Q of all heads are rows of one matrix; e_Z is of the Neural Process."""
    mixer = layer_of("neural_process").self_attn
    each = {len(rows) // len(mixer.heads) for rows in mixer.in_proj_weight.chunk(3)}
    return tuple(each | {size for head in mixer.heads for size in sizes(head.embed_output)})


def norms() -> str:
    """LayerNorm(x + mixed), then LayerNorm(o + e_O(o))."""
    layer, x = layer_of().eval(), torch.randn(2, 5, 1024, generator=generator())
    read = nnf.relu(layer.embed_input(x))
    first = nnf.layer_norm(x + layer.self_attn(read, read, read)[0], (1024,))
    wide = layer.linear2(layer.linear1(first).relu())
    same = torch.allclose(layer(x), nnf.layer_norm(first + wide, (1024,)), atol=1e-4)
    return "LayerNorm after each sum" if same else "another"


ANOMALY: dict[str, Callable[[], Any]] = {
    "anomaly: features": features_of_anomaly,
    "anomaly: images for training": lambda: len(cifar().train.x),
    "anomaly: images for testing": lambda: len(cifar().unseen.x),
    "anomaly: split over": split_over,
    "anomaly: items, outliers among them (section 5.5)": items_of_sets,
    "anomaly: size of a head": lambda: only({layer_of(model).self_attn.head_dim for model in anomaly.MODELS}),
    "anomaly: epochs": epochs,
    "anomaly: schedule": warm_cosine,
    "anomaly: period of the warmup": warmup,
    "anomaly: loss": loss_of_sets,
    "anomaly: α": alpha_of_formers,
    "anomaly: e_X, linear, shared by the heads, then ReLU": e_x,
    "anomaly: e_K, e_V, e_Q, e_Z, linear, per head": per_head,
    "anomaly: e_C": lambda: sizes(layer_of("neural_process").self_attn.heads[0].embed_context),
    "anomaly: after the heads, linear": lambda: only({sizes(layer_of(m).self_attn.out_proj) for m in anomaly.MODELS}),
    "anomaly: e_O": lambda: only({(*sizes(one.linear1), *sizes(one.linear2)) for one in map(layer_of, anomaly.MODELS)}),
    "anomaly: norm": norms,
    "anomaly: optimiser": optimiser(anomaly),
    "anomaly: scale of the map, Transformer": lambda: scale_of_map("attention"),
    "anomaly: scale of the map, Lin-Transformer": lambda: scale_of_map("linear_attention"),
    "anomaly: scale of the map, Informer": lambda: scale_of_intention("intention"),
    "anomaly: scale of the map, σInformer": lambda: scale_of_intention("sigma_intention"),
}

MEASURED: dict[str, Callable[[], Any]] = {
    "pixels: queries": pixels_queries,
    "pixels: models": pixels_models,
    "pixels: positions": pixels_positions,
    "pixels: optimiser": optimiser(pixels),
    "pixels: loss": loss(pixels.loss),
    **FEW_SHOT,
    **ANOMALY,
}


@pytest.mark.parametrize("row", CODE, ids=name_of)
def test_what_is_code_is_as_the_table_says(row: Row) -> None:
    assert name_of(row) in MEASURED, f"measure {name_of(row)!r} in this test"
    assert MEASURED[name_of(row)]() == row.expected


def test_nothing_is_measured_that_is_not_in_the_table() -> None:
    assert set(MEASURED) == {name_of(row) for row in CODE}
