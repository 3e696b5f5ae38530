"""Plane: the paper's Figure 4 alive. V = K w on a plane, four computations, inside and outside of the context."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from intention import functional as F
from intention.lab.core.results import Json
from intention.lab.experiments.computations_2d import agreement
from intention.lab.experiments.computations_2d.task import SQUARES, plane
from intention.play.fields import Choice, Points, Row, State
from intention.play.scenes.base import DTYPE, Panel, Ridge, Scene, alpha_field, listing, numbers, tensor
from intention.play.scenes.drawing import maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

REACH, GRID, MOST = 2.5, 25, 80
PANELS = {
    "attention": Panel("Attention", "softmax(Q Kᵀ) V", "attention"),
    "linear_attention": Panel("Linear attention", "Q Kᵀ V", "linear_attention"),
    "sigma_intention": Panel("σIntention", "softmax([scale:]Q (KᵀK + [alpha:α] I)⁻¹ Kᵀ) V", "sigma_intention"),
    "intention": Panel("Intention", "[scale:]Q (KᵀK + [alpha:α] I)⁻¹ Kᵀ V", "intention"),
}


def _example() -> tuple[Row, ...]:
    key = plane(1, 30, "absolute", torch.Generator().manual_seed(0)).key[0].clamp(-REACH, REACH)
    return tuple((round(float(a), 2), round(float(b), 2)) for a, b in key)


FIELDS = {
    "points": Points((("x", -REACH, REACH), ("y", -REACH, REACH)), _example(), MOST),
    "truth": Points((("w1", -REACH, REACH), ("w2", -REACH, REACH)), ((1.4, 0.9),), 1, 1),
    "where": Choice(
        "queries",
        {"inside": "inside: [−1, 1]²", "cloud": "the picture: [−2.5, 2.5]²", "outside": "outside: [−25, 25]²"},
        "cloud",
    ),
    "alpha": alpha_field(-6, "the paper's figure has α = 0"),
    "scale": Choice(
        "multiply by", {"one": "1: least squares", "alpha": "1 + α: towards attention"}, "one", "as in Line"
    ),
}


def reach(state: State) -> float:
    return {**SQUARES, "cloud": REACH}[state["where"]]


def answer(state: State) -> Json:
    side = torch.linspace(-reach(state), reach(state), GRID, dtype=DTYPE)
    query = torch.cartesian_prod(side, side)  # x is the slow index
    w = tensor(state["truth"]).mT
    true = query @ w
    out: Json = {"reach": reach(state), "grid": GRID, "true": numbers(true[:, 0], 4), "found": {}, "agreement": {}}
    if not state["points"]:
        return out
    key = tensor(state["points"])
    value = key @ w
    ridge = Ridge.of(state["alpha"], state["scale"] == "alpha")
    options = {"alpha": ridge.alpha, "covariance": ridge.covariance}
    found = {
        "attention": F.attention(query, key, value, scale=1.0),
        "linear_attention": F.linear_attention(query, key, value),
        "sigma_intention": F.sigma_intention(query, key, value, **options),
        "intention": F.intention(query, key, value, **options),
    }
    out["found"] = {name: numbers(map[:, 0], 4) for name, map in found.items()}
    out["agreement"] = {name: _told(agreement(map, true)) for name, map in found.items()}
    return out


def _told(found: dict[str, float]) -> Json:
    """What is constant correlates with nothing: None."""
    return {name: numbers(tensor(value), 6) for name, value in found.items()}


def code(state: State) -> str:
    ridge, far = Ridge.of(state["alpha"], state["scale"] == "alpha"), reach(state)
    return f"""import torch
from intention import functional as F

key = torch.tensor({listing(state["points"])}, dtype=torch.float64).reshape(-1, 2)
w = torch.tensor({listing(state["truth"])}, dtype=torch.float64).mT
value = key @ w
side = torch.linspace({-far}, {far}, {GRID}, dtype=torch.float64)
query = torch.cartesian_prod(side, side)
options = dict(alpha={ridge.alpha!r}, covariance={ridge.covariance!r})

found = {{
    "attention": F.attention(query, key, value, scale=1.0),
    "linear_attention": F.linear_attention(query, key, value),
    "sigma_intention": F.sigma_intention(query, key, value, **options),
    "intention": F.intention(query, key, value, **options),
}}
found = {{name: map[:, 0] for name, map in found.items()}}
"""


def draw(state: State, answered: Json) -> Figure:
    return maps(PANELS, answered["found"], answered["grid"], answered["reach"], state["points"])


SCENE = Scene(
    name="plane",
    title="Plane",
    lead="Values are a linear map of the keys, v = w · k. Who recovers it, inside the cloud and far outside?",
    ask="Drag the arrow w, then ask outside: the averages stay within the values they have seen, Intention goes on.",
    paper="Figure 4",
    docs=("docs/functional.md", {"functional.intention": F.intention, "functional.attention": F.attention}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
