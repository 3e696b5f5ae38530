"""Rabbit: five points of a cloud are dragged; where do the others go?"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention import fit, kernels
from intention import functional as F
from intention.lab.core.results import Json
from intention.lab.experiments.kabsch import references
from intention.lab.experiments.kabsch.clouds import rabbit
from intention.lab.tasks import Episode
from intention.play.fields import Choice, Number, Points, State
from intention.play.scenes.base import DTYPE, Panel, Ridge, Scene, alpha_field, listing, numbers, tensor
from intention.play.scenes.drawing import panel_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

SIZE, REACH = 260, 4.0
KEYS = ((1.36, 0.42), (-1.99, -1.06), (1.02, -1.43), (0.62, 2.12), (-1.39, -0.29))  # nose, tail, paw, ear, back
PANELS = {
    "intention": Panel("Intention", "[kernel:k](Q, K) ([kernel:k](K, K) + [alpha:α] I)⁻¹ V, centred", "intention"),
    "affine": Panel("Affine least squares", "Intention with an intercept, α = 0", "intention_lda"),
    "umeyama": Panel("Umeyama", "the best rotation, scale and shift", "linear_attention"),
    "attention": Panel("Attention", "softmax([temperature:τ] Q Kᵀ) V", "attention"),
}
MOVED = ((2.38, -0.01), (-2.22, 0.34), (0.86, -1.89), (2.44, 2.3), (-1.17, 0.76))
FIELDS = {
    "points": Points((("x", -REACH, REACH), ("y", -REACH, REACH)), MOVED, len(KEYS), len(KEYS)),
    "kernel": Choice("kernel k of Intention", {"linear": "linear", "gaussian": "Gaussian: it bends"}, "linear"),
    "alpha": alpha_field(-3),
    "gamma": Number("width γ of the kernel", -2, 2, -1, 0.05, power=True),
    "temperature": Number("softmax sharpness τ", -1, 3, 0.5, 0.05, power=True),
}


@functools.cache
def cloud() -> Tensor:
    return rabbit(SIZE, torch.Generator().manual_seed(7)).points.to(DTYPE)


def kernel_of(state: State) -> kernels.Kernel | None:
    return kernels.Gaussian(10.0 ** state["gamma"]) if state["kernel"] == "gaussian" else None


def answer(state: State) -> Json:
    query, key, value = cloud(), tensor(KEYS), tensor(state["points"])
    episode = Episode(query[None], key[None], value[None], query[None])
    alpha = Ridge.of(state["alpha"], False).alpha
    found = {
        "intention": fit(key, value, alpha, intercept=True, kernel=kernel_of(state))(query),
        "affine": references.affine(episode)[0],
        "umeyama": references.umeyama(episode)[0],
        "attention": F.attention(query, key, value, scale=10.0 ** state["temperature"]),
    }
    return {
        "cloud": numbers(query, 3),
        "key": [list(row) for row in KEYS],
        "reach": REACH,
        "found": {name: numbers(points.flatten(), 4) for name, points in found.items()},
    }


def code(state: State) -> str:
    kernel = f", kernel=kernels.Gaussian({10.0 ** state['gamma']!r})" if state["kernel"] == "gaussian" else ""
    return f"""import torch
from intention import fit, functional as F, kernels
from intention.lab.experiments.kabsch import references
from intention.lab.experiments.kabsch.clouds import rabbit
from intention.lab.tasks import Episode

query = rabbit({SIZE}, torch.Generator().manual_seed(7)).points.double()
key = torch.tensor({listing(KEYS)}, dtype=torch.float64)
value = torch.tensor({listing(state["points"])}, dtype=torch.float64)
episode = Episode(query[None], key[None], value[None], query[None])

found = {{
    "intention": fit(key, value, {Ridge.of(state["alpha"], False).alpha!r}, intercept=True{kernel})(query),
    "affine": references.affine(episode),
    "umeyama": references.umeyama(episode),
    "attention": F.attention(query, key, value, scale={10.0 ** state["temperature"]!r}),
}}
"""


def draw(state: State, answered: Json) -> Figure:
    figure, axes = panel_axes([panel.title for panel in PANELS.values()], 4, 3.2)
    for axis, (name, _) in zip(axes, PANELS.items(), strict=True):
        flat = answered["found"][name]
        axis.plot(*zip(*answered["cloud"], strict=True), ".", color="#BBBBBB", markersize=1.5)
        axis.plot(flat[::2], flat[1::2], ".", color="#E08A00", markersize=2.5)
        axis.plot(*zip(*state["points"], strict=True), "o", color="black", markersize=5)
        axis.set(xlim=(-REACH, REACH), ylim=(-REACH, REACH), aspect="equal")
    return figure


SCENE = Scene(
    name="rabbit",
    title="Rabbit",
    lead="Five points of the rabbit and where they went. A computation that has understood the map moves the whole "
    "rabbit; an average pulls it together.",
    ask="Drag the ear. Then choose the Gaussian kernel: the rabbit bends through all five points.",
    paper="section 5.4, Figures 10 and 11",
    docs=("docs/context.md", {"fit": fit, "functional.attention": F.attention}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
