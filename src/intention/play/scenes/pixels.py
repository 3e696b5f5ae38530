"""Pixels: some pixels of a glyph are seen; three trained models complete it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention.lab.core.results import Json
from intention.lab.data import glyphs
from intention.lab.experiments.pixels import PIXELS, SIDE
from intention.nn import Intention, NeuralProcess
from intention.play import models
from intention.play.fields import Choice, Digits, State
from intention.play.scenes.base import Panel, Scene, numbers
from intention.play.scenes.drawing import panel_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

GLYPHS = "78EKPVdenpsßæŒЖდש"  # of the held-out classes: no model has seen these
PANELS = {
    "intention": Panel("Intention", "e(Q) (e(K)ᵀ e(K) + α I)⁻¹ e(K)ᵀ V", "intention"),
    "neural_process": Panel("Neural Process", "e(Q, mean e(K, V))", "neural_process"),
    "attention": Panel("Attention", "e(softmax(e(Q) e(K)ᵀ) e(V))", "attention"),
}


def _first(count: int) -> str:
    """So many pixels at random, as a mask of hexadecimal digits: four pixels a digit, the first is the highest bit."""
    chosen = set(torch.randperm(PIXELS, generator=torch.Generator().manual_seed(1))[:count].tolist())
    bits = "".join("1" if pixel in chosen else "0" for pixel in range(PIXELS))
    return f"{int(bits, 2):0{PIXELS // 4}x}"


FIELDS = {
    "glyph": Choice("glyph", {character: character for character in GLYPHS}, "K"),
    "hand": Choice("the pointer", {"reveal": "reveals pixels", "hide": "hides pixels", "draw": "draws ink"}, "reveal"),
    "seen": Digits(PIXELS // 4, _first(120)),
    "drawn": Digits(PIXELS),  # a grey of 16 for each pixel, where somebody has drawn
}


@functools.cache
def image(character: str) -> Tensor:
    """The glyph in one font, undistorted, (784,) in [0, 1]."""
    import matplotlib
    from PIL import Image, ImageFont

    font = ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")), 46)
    small = Image.fromarray(glyphs.draw(character, font)).resize((SIDE, SIDE), Image.Resampling.BOX)
    return torch.tensor(list(small.tobytes())).float() / 255


def inputs(state: State) -> tuple[Tensor, Tensor]:
    """The picture (784,) and which of its pixels are seen (N,)."""
    drawn = state["drawn"]
    shown = torch.tensor([int(digit, 16) / 15 for digit in drawn]) if drawn else image(state["glyph"])
    mask = state["seen"] or "0" * (PIXELS // 4)
    bits = f"{int(mask, 16):0{PIXELS}b}"
    return shown, torch.tensor([index for index, bit in enumerate(bits) if bit == "1"], dtype=torch.long)


def answer(state: State) -> Json:
    shown, seen = inputs(state)
    out: Json = {"side": SIDE, "truth": numbers(shown, 3), "count": len(seen), "found": {}, "error": {}}
    if not len(seen):
        return out
    query, key = torch.arange(PIXELS)[None, :, None], seen[None, :, None]
    for name in PANELS:
        found = models.trained("pixels", name)(query, key, shown[key])[0, :, 0]
        out["found"][name] = numbers(found, 4)
        out["error"][name] = float(f"{(found - shown).square().mean().item():.4g}")
    return out


def code(state: State) -> str:
    return f"""import torch
from intention.play import models
from intention.play.scenes import pixels

state = {{
    "glyph": {state["glyph"]!r},
    "seen": "{state["seen"]}",
    "drawn": "{state["drawn"]}",
}}
shown, seen = pixels.inputs(state)  # the picture (784,), and the numbers of the pixels that are seen
query, key = torch.arange(784)[None, :, None], seen[None, :, None]

names = ("intention", "neural_process", "attention")
found = {{name: models.trained("pixels", name)(query, key, shown[key]).flatten() for name in names}}
"""


def draw(state: State, answered: Json) -> Figure:
    titles = ["truth", *(panel.title for panel in PANELS.values())]
    figure, axes = panel_axes(titles, 4, 3.0)
    pictures = [answered["truth"], *(answered["found"].get(name) for name in PANELS)]
    for axis, picture in zip(axes, pictures, strict=True):
        if picture is not None:
            axis.imshow(torch.tensor(picture).reshape(SIDE, SIDE).tolist(), cmap="gray_r", vmin=0, vmax=1)
        axis.set(xticks=[], yticks=[])
    return figure


SCENE = Scene(
    name="pixels",
    title="Pixels",
    lead="An image as a function of the place: some pixels are seen, the models complete the rest. They were trained "
    "on other characters.",
    ask="Reveal more pixels where the picture is wrong, or choose “draws ink” and draw something of your own.",
    paper="section 5.1, Figures 7 and 13",
    docs=("docs/lab.md", {"nn.Intention": Intention, "nn.NeuralProcess": NeuralProcess}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
