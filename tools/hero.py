"""The picture at the top of README, documentation and report: three tasks, answered by attention and by Intention.

python tools/hero.py            trains and draws
python tools/hero.py --draw     draws again what docs/pictures/hero.json holds

Both models of each task are those of the lab at the sizes of `quick`, trained here from seed 0 on the same tasks with
equally many steps, each with its own searched learning rate. Two minutes of one core; needs the extra `lab`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor, nn

from intention.lab.core.place import Place
from intention.lab.core.train import train
from intention.lab.experiments import kabsch, pixels, sine
from intention.lab.experiments.base import COLOURS, Net
from intention.lab.experiments.episodes import loss
from intention.lab.experiments.kabsch.clouds import rabbit
from intention.lab.experiments.kabsch.model import build as build_kabsch
from intention.lab.experiments.kabsch.task import similarities
from intention.lab.experiments.pixels.task import held_out
from intention.lab.experiments.pixels.task import sample as sample_pixels
from intention.lab.experiments.sine.task import sample as sample_sine
from intention.lab.report.figures import to_svg, transparent
from intention.lab.tasks import Episode

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
IN_REPORT = ROOT / "src" / "intention" / "lab" / "report" / "pictures" / "hero.svg"
NUMBERS = PICTURES / "hero.json"
TITLE = (
    "Three tasks, answered by a trained attention and a trained Intention: a curve from 8 points, an image from a "
    "third of its pixels, a rabbit that was turned and moved, from 5 of its points. Intention lies on the truth."
)
STEPS = {"sine": 1000, "pixels": 800, "kabsch": 1500}
POINTS, PIXELS, SIDE = 8, 264, 28
MODELS = ("attention", "intention")
_COLOURS = tuple(COLOURS[model] for model in MODELS)


class Answer(NamedTuple):
    """One held-out task, and what the two models say; and their errors over many such tasks."""

    key: Tensor
    value: Tensor
    query: Tensor
    truth: Tensor
    attention: Tensor
    intention: Tensor
    errors: tuple[float, float]  # mean squared, attention and Intention


def curve() -> Answer:
    config = replace(sine.PRESETS["quick"], steps=STEPS["sine"])
    sample = partial(sample_sine, points=config.points, queries=config.queries)
    models = [_trained(partial(sine.build, config, name), sample, config.plan(name)) for name in MODELS]
    tests = sample_sine(200, torch.Generator().manual_seed(1), points=POINTS)
    return _answer(models, tests, shown=4)


def image() -> Answer:
    config = replace(pixels.PRESETS["quick"], steps=STEPS["pixels"])
    seen, unseen = pixels.images("built-in")
    sample = partial(sample_pixels, seen, points=config.points, queries=config.queries)
    models = [_trained(partial(pixels.build, config, name), sample, config.plan(name)) for name in MODELS]
    tests = held_out(unseen, 50, torch.Generator().manual_seed(1), points=[PIXELS])[PIXELS]
    return _answer(models, tests, shown=4)


def cloud() -> Answer:
    config = replace(kabsch.PRESETS["quick"], steps=STEPS["kabsch"])
    models = []
    for name in MODELS:
        net: Net = getattr(config, name)
        build = partial(build_kabsch, name, net.embed, net.decode, heads=net.heads, alpha=config.alpha)
        models.append(_trained(build, partial(config.sample, dims=2), config.plan(name)))
    generator = torch.Generator().manual_seed(7)
    points = rabbit(700, generator).points
    chosen = torch.rand(100, len(points), generator=generator).argsort(-1)[:, : config.points]
    maps = similarities(100, generator, smallest=config.smallest, largest=config.largest)
    query, key = points.expand(100, -1, -1), points[chosen]
    value = maps(key) + config.noise * torch.randn(key.shape, generator=generator)
    return _answer(models, Episode(query, key, value, maps(query)), shown=8)


def _trained(build: Callable[[], nn.Module], sample: Any, plan: Any) -> nn.Module:
    torch.manual_seed(0)
    model = build()
    train(model, sample, loss, plan, seed=0, place=Place())
    return model


@torch.no_grad()
def _answer(models: Sequence[nn.Module], tests: Episode, shown: int) -> Answer:
    said = [model(tests.query, tests.key, tests.value) for model in models]
    first, second = (float((x - tests.target).square().mean()) for x in said)
    query = tests.query.expand(len(tests.key), -1, -1)
    parts = (tests.key, tests.value, query, tests.target, *said)
    return Answer(*(x[shown] for x in parts), errors=(first, second))


def draw(answers: dict[str, Answer], ink: str = "black") -> Figure:
    """Three panels; `ink` is the colour of text and truth."""
    figure = Figure(figsize=(12, 4.3))
    parts: Any = figure.subfigures(1, 3, width_ratios=(1.2, 1, 1))
    fills = {"sine": _fill_curve, "pixels": _fill_image, "kabsch": _fill_cloud}
    names = {"sine": "a curve from 8 points", "pixels": "an image from a third of it", "kabsch": "a map from 5 points"}
    for part, (name, answer) in zip(parts, answers.items(), strict=True):
        part.suptitle(names[name], color=ink, fontsize=15, y=0.985)
        fills[name](part, answer, ink)
        worse, better = answer.errors
        times = worse / better
        text = f"error {times:.0f} times smaller" if times >= 10 else f"error {times:.1f} times smaller"
        part.text(0.5, 0.015, text, color=COLOURS["intention"], fontsize=13, ha="center")
    return figure


def _fill_curve(part: Any, answer: Answer, ink: str) -> None:
    axes = part.subplots(gridspec_kw={"left": 0.03, "right": 0.95, "bottom": 0.21, "top": 0.87})
    x = answer.query[:, 0]
    axes.plot(x, answer.truth[:, 0], color=ink, linewidth=7, alpha=0.2, label="truth", solid_capstyle="round")
    axes.plot(x, answer.attention[:, 0], color=COLOURS["attention"], linewidth=2.2, label="attention")
    axes.plot(x, answer.intention[:, 0], color=COLOURS["intention"], linewidth=2.2, label="Intention")
    axes.plot(answer.key[:, 0], answer.value[:, 0], "o", color=ink, markersize=6, label="seen")
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=4, frameon=False, fontsize=12, labelcolor=ink,
        handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
    _bare(axes)


def _fill_image(part: Any, answer: Answer, ink: str) -> None:
    seen = torch.full((SIDE * SIDE,), torch.nan)
    seen[answer.key[:, 0].long()] = answer.value[:, 0]
    shades = LinearSegmentedColormap.from_list("ink", ["#f3f1ec", "#1b1f24"])
    shades.set_bad("#b9c4d0")
    for axes, x in zip(_four(part, ink), (seen, answer.attention, answer.intention, answer.truth), strict=True):
        axes.imshow(x.reshape(SIDE, SIDE), cmap=shades, vmin=0, vmax=1, interpolation="nearest")


def _fill_cloud(part: Any, answer: Answer, ink: str) -> None:
    seen, *others = _four(part, ink)
    for start, end in zip(answer.key, answer.value, strict=True):
        seen.annotate("", end.tolist(), start.tolist(), arrowprops={"arrowstyle": "->", "color": "#8c959f"})
    seen.plot(*answer.key.T, "o", color=ink, fillstyle="none", markersize=5)
    seen.plot(*answer.value.T, "o", color=ink, markersize=5)
    for axes, x, colour in zip(
        others, (answer.attention, answer.intention, answer.truth), (*_COLOURS, ink), strict=True
    ):
        _dots(axes, answer.truth, color=ink, alpha=0.15)
        _dots(axes, x, color=colour)
    for axes in (seen, *others):
        shown = [answer.key, answer.value, answer.truth] if axes is seen else [answer.truth, answer.attention]
        both = torch.cat(shown)
        middle, half = (both.amin(0) + both.amax(0)) / 2, 0.53 * float((both.amax(0) - both.amin(0)).max())
        axes.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half), aspect="equal")


def _dots(axes: Any, points: Tensor, **style: Any) -> None:
    """One path of lines without length, whose round ends are dots: a marker for each would be a larger file."""
    gaps = torch.full_like(points, torch.nan)
    ends = torch.stack([points, points + 1e-4, gaps], 1).flatten(0, 1)
    axes.plot(*ends.T, linewidth=1.3, solid_capstyle="round", **style)


def _four(part: Any, ink: str) -> list[Any]:
    """Seen, attention, Intention and truth, two by two, each with its name above."""
    room = {"left": 0.04, "right": 0.96, "bottom": 0.1, "top": 0.83, "hspace": 0.24, "wspace": 0.05}
    grid = list(part.subplots(2, 2, gridspec_kw=room).flat)
    names = {"seen": ink, "attention": COLOURS["attention"], "Intention": COLOURS["intention"], "truth": ink}
    for axes, (name, colour) in zip(grid, names.items(), strict=True):
        axes.set_title(name, color=colour, fontsize=12, pad=3)
        _bare(axes)
    return grid


def _bare(axes: Any) -> None:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(False)


def save(answers: dict[str, Answer]) -> None:
    """The answers, with three digits after the point, so that the picture can be drawn again without training."""
    plain = {
        name: {k: v if k == "errors" else _numbers(v) for k, v in answer._asdict().items()}
        for name, answer in answers.items()
    }
    NUMBERS.write_text(json.dumps(plain) + "\n", encoding="utf-8")


def _numbers(x: Tensor) -> list[list[float]]:
    return [[round(number, 3) for number in row] for row in x.tolist()]


def saved() -> dict[str, Answer]:
    plain: dict[str, dict[str, Any]] = json.loads(NUMBERS.read_text(encoding="utf-8"))
    answers = {}
    for name, answer in plain.items():
        tensors = [torch.tensor(answer[field]) for field in Answer._fields[:-1]]
        answers[name] = Answer(*tensors, errors=tuple(answer["errors"]))
    return answers


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    if "--draw" not in sys.argv[1:]:
        save({"sine": curve(), "pixels": image(), "kabsch": cloud()})
    svg = to_svg(lambda: draw(saved()), "hero", TITLE)
    IN_REPORT.write_text(svg + "\n", encoding="utf-8")
    for name, dark in (("hero", False), ("hero-dark", True)):
        (PICTURES / f"{name}.svg").write_bytes(transparent(svg, dark))


if __name__ == "__main__":
    main()
