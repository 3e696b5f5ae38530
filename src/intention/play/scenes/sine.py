"""Sine: few-shot regression. Observations of y = a sin(x - b), and what trained models make of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from intention.lab.core.results import Json
from intention.lab.experiments.sine.task import AMPLITUDE, PHASE, X
from intention.nn import Intention, NeuralProcess
from intention.play import models
from intention.play.fields import Number, Points, State
from intention.play.scenes.base import Panel, Scene, listing, numbers
from intention.play.scenes.drawing import curve_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

GRID, MOST = 121, 20
Y = (-6.0, 6.0)
COUNTS = (1, 2, 3, 5, 7, 10, 14, 20)  # observations at which the error is shown
PANELS = {
    "intention": Panel("Intention", "e(Q) (e(K)ᵀ e(K) + α I)⁻¹ e(K)ᵀ V", "intention"),
    "untrained": Panel("Intention, untrained", "the same at step 0", "intention_kernel"),
    "attention": Panel("Attention", "e(softmax(e(Q) e(K)ᵀ) e(V))", "attention"),
    "neural_process": Panel("Neural Process", "e(Q, mean e(K, V))", "neural_process"),
    "maml": Panel("MAML", "3 gradient steps on (K, V)", "maml"),
    "errors": Panel("Error by observations", "MSE of the first 1, 2, 3, … points", ""),
}
FIELDS = {
    "points": Points((("x", *X),), ((-4.6,), (1.1,), (3.4,), (-1.9,), (5.2,)), MOST),
    "amplitude": Number("amplitude a", *AMPLITUDE, 3.2),
    "phase": Number("phase b", PHASE[0], math.floor(100 * PHASE[1]) / 100, 1.0),
}


def model(name: str) -> nn.Module:
    return models.untrained("sine", "intention") if name == "untrained" else models.trained("sine", name)


def truth(state: State, x: Tensor) -> Tensor:
    return state["amplitude"] * torch.sin(x - state["phase"])


def answer(state: State) -> Json:
    query = torch.linspace(*X, GRID)[None, :, None]
    true = truth(state, query)
    out: Json = {"x": numbers(query.flatten(), 4), "true": numbers(true.flatten(), 4), "found": {}, "errors": {}}
    out["y"] = numbers(truth(state, torch.tensor(state["points"]).reshape(-1)), 4)
    if not state["points"]:
        return out
    key = torch.tensor(state["points"])[None]
    value = truth(state, key)
    counts = [n for n in COUNTS if n < len(state["points"])] + [len(state["points"])]
    for name in (name for name in PANELS if name != "errors"):
        found = {n: model(name)(query, key[:, :n], value[:, :n]) for n in counts}
        out["found"][name] = numbers(found[counts[-1]].flatten(), 4)
        out["errors"][name] = [float(f"{(curve - true).square().mean().item():.4g}") for curve in found.values()]
    return out | {"counts": counts}


def code(state: State) -> str:
    return f"""import torch
from intention.play import models

x = torch.tensor({listing(state["points"])}).reshape(1, -1, 1)
y = {state["amplitude"]!r} * torch.sin(x - {state["phase"]!r})
query = torch.linspace({X[0]}, {X[1]}, {GRID})[None, :, None]
names = ("intention", "attention", "neural_process", "maml")
known = {{name: models.trained("sine", name) for name in names}}
known["untrained"] = models.untrained("sine", "intention")

found = {{name: model(query, x, y).flatten() for name, model in known.items()}}
"""


def draw(state: State, answered: Json) -> Figure:
    rows = list(zip((row[0] for row in state["points"]), answered["y"], strict=True))
    return curve_panels({name: PANELS[name] for name in answered["found"]}, answered, rows, X, Y)


SCENE = Scene(
    name="sine",
    title="Sine",
    lead="Few-shot regression: each model has seen thousands of waves y = a sin(x − b) and now gets a few points of "
    "one it does not know. The dotted line is the truth.",
    ask="Take points away one by one: with three, Intention still knows the wave. Then drag them close together.",
    paper="section 5.1, Figures 6 and 7",
    docs=("docs/lab.md", {"nn.Intention": Intention, "nn.NeuralProcess": NeuralProcess}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
