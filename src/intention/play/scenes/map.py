"""Map: KVQ space itself. Six of its members on the same few points; each opens its scene."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from intention import functional as F
from intention import nn
from intention.lab.core.results import Json
from intention.play import models
from intention.play.fields import Points, State
from intention.play.scenes.base import DTYPE, Panel, Ridge, Scene, alpha_field, listing, numbers, tensor
from intention.play.scenes.drawing import curve_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

X, Y, GRID = (-6.0, 6.0), (-5.0, 5.0), 97
PANELS = {
    "intention": Panel("Intention", "Q (KᵀK + [alpha:α] I)⁻¹ Kᵀ V", "intention"),
    "sigma_intention": Panel("σIntention", "softmax(Q (KᵀK + [alpha:α] I)⁻¹ Kᵀ) V", "sigma_intention"),
    "linear_attention": Panel("Linear attention", "Q Kᵀ V", "linear_attention"),
    "attention": Panel("Attention", "softmax(Q Kᵀ) V", "attention"),
    "erf": Panel("f_erf", "erf(Q Kᵀ) V", "mlp"),
    "neural_process": Panel("Neural Process", "e(Q, mean e(K, V))", "neural_process"),
}
FIELDS = {
    "points": Points((("x", *X), ("y", *Y)), ((-4.2, 1.6), (-2.4, -2.6), (0.6, 3.1), (2.3, 1.4), (4.6, -3.0)), 20),
    "alpha": alpha_field(-2, "multiplied by 1 + α: 0 is least squares, ∞ is attention"),
}
SHARP = 12.0  # of both softmaxes; features have length 1


def features(x: torch.Tensor) -> torch.Tensor:
    """sin and cos of x and x / 2, of length 1: enough for curves, few enough to be looked at."""
    angle = x * torch.tensor([0.5, 1.0], dtype=x.dtype)
    return torch.cat([angle.sin(), angle.cos()], -1) / 2**0.5


def answer(state: State) -> Json:
    query = torch.linspace(*X, GRID, dtype=DTYPE)[:, None]
    out: Json = {"x": numbers(query[:, 0]), "found": {}}
    if not state["points"]:
        return out
    x, y = tensor(state["points"]).split(1, -1)
    n, Q, K = len(x), features(query), features(x)
    ridge = Ridge.of(state["alpha"], True)
    options = {"alpha": ridge.alpha, "covariance": ridge.covariance, "weight": torch.full((n,), 1 / n, dtype=DTYPE)}
    process = models.trained("sine", "neural_process")
    found = {
        "intention": F.intention(Q, K, y, **options),
        "sigma_intention": F.sigma_intention(Q, K, y, scale=SHARP, **options),
        "linear_attention": F.linear_attention(Q, K, y, scale=1 / n),
        "attention": F.attention(Q, K, y, scale=SHARP),
        "erf": torch.erf(Q @ K.mT) @ y / n,
        "neural_process": process(query.float()[None], x.float()[None], y.float()[None])[0],
    }
    return out | {"found": {name: numbers(curve[:, 0]) for name, curve in found.items()}}


def code(state: State) -> str:
    ridge = Ridge.of(state["alpha"], True)
    return f"""import torch
from intention import functional as F
from intention.play import models

points = torch.tensor({listing(state["points"])}, dtype=torch.float64)
x, y = points.reshape(-1, 2).split(1, -1)
query = torch.linspace({X[0]}, {X[1]}, {GRID}, dtype=torch.float64)[:, None]


def features(x):
    angle = x * torch.tensor([0.5, 1.0], dtype=x.dtype)
    return torch.cat([angle.sin(), angle.cos()], -1) / 2**0.5


n, Q, K = len(x), features(query), features(x)
weight = torch.full((n,), 1 / n, dtype=torch.float64)
options = dict(alpha={ridge.alpha!r}, covariance={ridge.covariance!r}, weight=weight)
process = models.trained("sine", "neural_process")
found = {{
    "intention": F.intention(Q, K, y, **options),
    "sigma_intention": F.sigma_intention(Q, K, y, scale={SHARP}, **options),
    "linear_attention": F.linear_attention(Q, K, y, scale=1 / n),
    "attention": F.attention(Q, K, y, scale={SHARP}),
    "erf": torch.erf(Q @ K.mT) @ y / n,
    "neural_process": process(query.float()[None], x.float()[None], y.float()[None])[0],
}}
found = {{name: curve[:, 0] for name, curve in found.items()}}
"""


def draw(state: State, answered: Json) -> Figure:
    return curve_panels(PANELS, answered, state["points"], X, Y)


SCENE = Scene(
    name="map",
    title="Map",
    lead="KVQ space: computations that take keys, values and queries, do not care for the order of the pairs, and "
    "answer each query. Every box computes the same few points.",
    ask="Move α from 0 to ∞ and watch the upper row become the lower one. Open a box to play with it.",
    paper="Figure 1",
    docs=("docs/index.md", {"functional.linear_attention": F.linear_attention, "nn.NeuralProcess": nn.NeuralProcess}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
