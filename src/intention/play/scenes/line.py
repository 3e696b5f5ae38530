"""Line: points on a curve, and what five computations make of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention import features, fit, kernels
from intention import functional as F
from intention.lab.core.results import Json
from intention.play import models
from intention.play.fields import Choice, Flag, Number, Points, Row, State
from intention.play.scenes.base import ALPHA, DTYPE, Panel, Ridge, Scene, alpha_field, listing, numbers, tensor
from intention.play.scenes.drawing import curve_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE", "choose"]

X, Y, GRID, FEATURES, MOST = (-3.0, 3.0), (-2.0, 2.0), 121, 64, 60
KERNELS = {
    "gaussian": kernels.Gaussian,
    "laplacian": kernels.Laplacian,
    "polynomial": lambda gamma: kernels.Polynomial(3, gamma),
    "arccosine": lambda gamma: kernels.ArcCosine(),
    "linear": lambda gamma: kernels.Linear(),
}
WRITTEN = {
    "gaussian": "kernels.Gaussian({gamma!r})",
    "laplacian": "kernels.Laplacian({gamma!r})",
    "polynomial": "kernels.Polynomial(3, {gamma!r})",
    "arccosine": "kernels.ArcCosine()",
    "linear": "kernels.Linear()",
}
PANELS = {
    "attention": Panel("Attention", "softmax([temperature:τ] Q Kᵀ) V", "attention"),
    "linear_attention": Panel("Linear attention", "Q Kᵀ V / N", "linear_attention"),
    "kernel": Panel(
        "Kernel Intention", "[scale:][kernel:k](Q,K) ([kernel:k](K,K) + N[alpha:α] I)⁻¹ V", "intention_kernel"
    ),
    "sigma_intention": Panel("σIntention", "softmax([temperature:τ] [scale:]Q [alpha:Σ]⁻¹ Kᵀ) V", "sigma_intention"),
    "intention": Panel("Intention", "[scale:]Q (KᵀK + N[alpha:α] I)⁻¹ Kᵀ V", "intention"),
    "left_out": Panel("Leave one out", "vᵢ − f₋ᵢ(kᵢ), of Intention", "intention"),
}


def _example() -> tuple[Row, ...]:
    """14 points of a wave with some noise."""
    generator = torch.Generator().manual_seed(4)
    x = torch.linspace(-2.6, 2.5, 14) + 0.12 * torch.randn(14, generator=generator)
    y = 1.1 * torch.sin(1.7 * x) + 0.25 * x + 0.12 * torch.randn(14, generator=generator)
    return tuple((round(float(a), 2), round(float(b), 2)) for a, b in zip(x, y, strict=True))


FIELDS = {
    "points": Points((("x", *X), ("y", *Y)), _example(), MOST),
    "alpha": alpha_field(-2.5, "small: through the points; large: flat"),
    "scale": Choice(
        "multiply by",
        {"one": "1: least squares", "alpha": "1 + α: towards attention"},
        "one",
        "with 1 + α, α → ∞ is linear attention, and with a softmax attention",
    ),
    "temperature": Number("softmax sharpness τ", -1, 3, 1, 0.05, power=True),
    "features": Choice(
        "features of x", {"raw": "x itself", "fourier": "64 random Fourier", "network": "a trained network"}, "fourier"
    ),
    "kernel": Choice("kernel k", {name: name for name in KERNELS}, "gaussian"),
    "gamma": Number("width γ of kernel and Fourier", -2, 2, 0, 0.05, power=True),
    "intercept": Flag("intercept", False, "a constant that is not regularised"),
    "band": Flag("variance band", True, "two standard deviations"),
}


def phi_of(state: State, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The features that keys and queries have: about as long as 1, but x itself."""
    if state["features"] == "raw":
        return lambda x: x
    if state["features"] == "fourier":
        seeded = torch.Generator().manual_seed(0)
        return features.fourier(kernels.Gaussian(10.0 ** state["gamma"]), x, FEATURES, seeded)
    return network


def network(x: Tensor) -> Tensor:
    """What the trained Intention of `sine` knows of x, in units of its mean length."""
    embed = models.trained("sine", "intention").get_submodule("embed_key")
    size = embed(torch.linspace(-6, 6, 50)[:, None]).square().sum(-1).mean().sqrt()
    return (embed(2 * x.float()) / size).to(x.dtype)


def curves(state: State, x: Tensor, y: Tensor, query: Tensor) -> dict[str, Tensor]:
    """The five, each (M,). Every point counts 1 / N: sums are means, and one alpha serves few and many points."""
    phi, n, intercept = phi_of(state, x), len(x), state["intercept"]
    weight, sharp = torch.full((n,), 1 / n, dtype=DTYPE), 10.0 ** state["temperature"]
    ridge = Ridge.of(state["alpha"], state["scale"] == "alpha")
    options = {"alpha": ridge.alpha, "covariance": ridge.covariance, "weight": weight, "intercept": intercept}
    K, Q = phi(x), phi(query)
    kernel = KERNELS[state["kernel"]](10.0 ** state["gamma"])
    found = {
        "attention": F.attention(Q, K, y, scale=sharp),
        "linear_attention": F.linear_attention(Q, K, y, scale=1 / n),
        "sigma_intention": F.sigma_intention(Q, K, y, scale=sharp, **options),
        "intention": F.intention(Q, K, y, **options),
        "kernel": fit(x, y, kernel=kernel, **options)(query),
    }
    return {name: curve[:, 0] for name, curve in found.items()}


def answer(state: State) -> Json:
    query = torch.linspace(*X, GRID, dtype=DTYPE)[:, None]
    out: Json = {"x": numbers(query[:, 0]), "found": {}, "band": {}, "left_out": [], "best": None, "distance": {}}
    if not state["points"]:
        return out
    x, y = tensor(state["points"]).split(1, -1)
    found = curves(state, x, y, query)
    out["found"] = {name: numbers(curve) for name, curve in found.items()}
    out["distance"] = {
        a: float((found[a] - found[b]).abs().max())
        for a, b in (("intention", "linear_attention"), ("sigma_intention", "attention"))
    }
    phi, alpha = phi_of(state, x), Ridge.of(state["alpha"], False).alpha
    given = {"weight": torch.full((len(x),), 1 / len(x), dtype=DTYPE), "intercept": state["intercept"]}
    context = fit(phi(x), y, alpha, **given)
    out["left_out"] = numbers(context.leave_one_out()[:, 0])
    if state["band"] and state["scale"] == "one":
        bent = fit(x, y, alpha, kernel=KERNELS[state["kernel"]](10.0 ** state["gamma"]), **given)
        out["band"] = {
            name: numbers(2 * one.variance(at).clamp_min(0).sqrt())
            for name, one, at in (("intention", context, phi(query)), ("kernel", bent, query))
        }
    return out


def choose(state: State) -> Json:
    """alpha by leave-one-out, for Intention: the power of ten that the slider shows."""
    if not state["points"]:
        return {"alpha": state["alpha"]}
    x, y = tensor(state["points"]).split(1, -1)
    weight = torch.full((len(x),), 1 / len(x), dtype=DTYPE)
    chosen = float(fit(phi_of(state, x)(x), y, "loo", weight, intercept=state["intercept"]).alpha)
    low, high = ALPHA
    return {"alpha": round(min(max(math.log10(max(chosen, 1e-12)), low + 0.05), high - 0.05), 3)}


def code(state: State) -> str:
    gamma, sharp = 10.0 ** state["gamma"], 10.0 ** state["temperature"]
    ridge = Ridge.of(state["alpha"], state["scale"] == "alpha")
    phi = {
        "raw": "phi = lambda x: x",
        "fourier": "seeded = torch.Generator().manual_seed(0)\n"
        f"phi = features.fourier(kernels.Gaussian({gamma!r}), x, {FEATURES}, seeded)",
        "network": "from intention.play.scenes.line import network as phi  # trained on sine curves",
    }[state["features"]]
    return f"""import torch
from intention import features, fit, functional as F, kernels

points = torch.tensor({listing(state["points"])}, dtype=torch.float64)
x, y = points.reshape(-1, 2).split(1, -1)
query = torch.linspace({X[0]}, {X[1]}, {GRID}, dtype=torch.float64)[:, None]
{phi}
n = len(x)
options = dict(alpha={ridge.alpha!r}, covariance={ridge.covariance!r}, intercept={state["intercept"]},
               weight=torch.full((n,), 1 / n, dtype=torch.float64))

Q, K = phi(query), phi(x)
found = {{
    "attention": F.attention(Q, K, y, scale={sharp!r}),
    "linear_attention": F.linear_attention(Q, K, y, scale=1 / n),
    "sigma_intention": F.sigma_intention(Q, K, y, scale={sharp!r}, **options),
    "intention": F.intention(Q, K, y, **options),
    "kernel": fit(x, y, kernel={WRITTEN[state["kernel"]].format(gamma=gamma)}, **options)(query),
}}
found = {{name: curve[:, 0] for name, curve in found.items()}}
"""


def draw(state: State, answered: Json) -> Figure:
    panels = {name: panel for name, panel in PANELS.items() if name in answered["found"]}
    return curve_panels(panels, answered, state["points"], X, Y)


SCENE = Scene(
    name="line",
    title="Line",
    lead="The same points, five computations. Attention averages values, Intention fits them.",
    ask="Drag a point far away and see who follows. Then press “α → ∞”: Intention becomes linear attention, and "
    "σIntention becomes attention.",
    paper="section 2, theorems 2.8 and 2.9",
    docs=(
        "docs/functional.md",
        {"functional.intention": F.intention, "functional.sigma_intention": F.sigma_intention, "fit": fit},
    ),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
