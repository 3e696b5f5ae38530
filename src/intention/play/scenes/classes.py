"""Classes: coloured points, four classifiers that are one linear solve, and points that the others contradict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention import discriminant, fit, kernels
from intention.lab.core.results import Json
from intention.play.fields import Choice, Number, Points, Row, State
from intention.play.scenes.base import ALPHA, DTYPE, Panel, Scene, alpha_field, listing, tensor
from intention.play.scenes.drawing import regions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

REACH, GRID, MOST, CLASSES = 3.0, 51, 120, 3
PANELS = {
    "ls_svm": Panel("LS-SVM", "Q (KᵀK + [alpha:α] I)⁻¹ Kᵀ V, V = ±1, centred", "intention"),
    "lda": Panel("LDA", "Q (S + [alpha:α] I)⁻¹ mᶜ − ½ mᶜᵀ(S + [alpha:α] I)⁻¹ mᶜ", "intention_lda"),
    "qda": Panel("QDA", "one Sᶜ + [alpha:α] I for each class", "intention_qda"),
    "kernel": Panel("Kernel LS-SVM", "[gamma:k](Q, K) ([gamma:k](K, K) + [alpha:α] I)⁻¹ V", "intention_kernel"),
}


def _example() -> tuple[Row, ...]:
    """A cluster, a ring's part and a stripe; two points have the label of others."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(36, 2, generator=generator)
    angle = torch.linspace(0.2, 2.6, 12)
    first = torch.tensor([-1.3, -1.0]) + 0.5 * noise[:12]
    second = 1.7 * torch.stack([angle.cos(), angle.sin()], -1) + 0.22 * noise[12:24] + torch.tensor([-0.2, 0.1])
    third = torch.stack([torch.linspace(0.4, 2.4, 12), torch.linspace(-1.9, -0.7, 12)], -1) + 0.3 * noise[24:]
    rows = [(*p, c) for c, points in enumerate((first, second, third)) for p in points.tolist()]
    rows[3], rows[30] = (*rows[3][:2], 2), (*rows[30][:2], 0)
    return tuple((round(x, 2), round(y, 2), float(c)) for x, y, c in rows)


FIELDS = {
    "points": Points((("x", -REACH, REACH), ("y", -REACH, REACH), ("class", 0, CLASSES - 1)), _example(), MOST),
    "brush": Choice("new points are", {"0": "● orange", "1": "◆ blue", "2": "▲ green"}, "0"),
    "alpha": alpha_field(-1),
    "gamma": Number("width γ of the kernel", -2, 2, 0, 0.05, power=True),
}

Solve = Callable[..., discriminant.Classifier]


def classifiers(state: State) -> dict[str, Solve]:
    """Each called with (key, labels as one-hot values, weight)."""
    alpha = alpha_of(state)
    kernel = kernels.Gaussian(10.0 ** state["gamma"])
    return {
        "ls_svm": lambda key, value, weight=None: discriminant.ls_svm(key, value, alpha=alpha, weight=weight),
        "lda": lambda key, value, weight=None: discriminant.lda(key, value, alpha=alpha, weight=weight),
        "qda": lambda key, value, weight=None: discriminant.qda(key, value, alpha=alpha, weight=weight),
        "kernel": lambda key, value, weight=None: discriminant.ls_svm(
            key, value, alpha=alpha, kernel=kernel, weight=weight
        ),
    }


def alpha_of(state: State) -> float:
    """No end of the slider is 0 or infinity here: a class of one point has no covariance of its own."""
    return 10.0 ** min(max(state["alpha"], ALPHA[0]), ALPHA[1])


def split(state: State) -> tuple[Tensor, Tensor, list[int]]:
    """Points, one-hot values, and which classes these are: only those that have a point."""
    rows = tensor(state["points"]).reshape(-1, 3)
    labels = rows[:, 2].round().long()
    there = sorted(set(labels.tolist()))
    place = torch.tensor([there.index(label) for label in labels.tolist()], dtype=torch.long)
    return rows[:, :2], torch.nn.functional.one_hot(place, max(len(there), 1)).to(DTYPE), there


def answer(state: State) -> Json:
    key, value, there = split(state)
    out: Json = {"reach": REACH, "grid": GRID, "found": {}, "suspects": {}, "wrong": {}}
    if len(there) < 2:
        return out
    side = torch.linspace(-REACH, REACH, GRID, dtype=DTYPE)
    query = torch.cartesian_prod(side, side)
    names = torch.tensor(there)
    for name, solve in classifiers(state).items():
        model = solve(key, value)
        out["found"][name] = bytes((names + ord("0"))[model.predict(query)].tolist()).decode()
        out["wrong"][name] = int((model.predict(key) != value.argmax(-1)).sum())
        out["suspects"][name] = (left_out(name, state, key, value) != value.argmax(-1)).nonzero()[:, 0].tolist()
    return out


def left_out(name: str, state: State, key: Tensor, value: Tensor) -> Tensor:
    """The class of each point by a fit without it.

    An LS-SVM is a ridge, whose leave-one-out residuals have a closed form. The others are solved N times, as a batch:
    in the fit number i the weight of point i is 0.
    """
    if name in ("ls_svm", "kernel"):
        kernel = kernels.Gaussian(10.0 ** state["gamma"]) if name == "kernel" else None
        context = fit(key, 2 * value - 1, alpha_of(state), intercept=True, kernel=kernel)
        return (2 * value - 1 - context.leave_one_out()).argmax(-1)
    n = len(key)
    weight = 1 - torch.eye(n, dtype=DTYPE)
    model = classifiers(state)[name](key.expand(n, -1, -1), value.expand(n, -1, -1), weight)
    return model.predict(key.unsqueeze(1))[:, 0]


def code(state: State) -> str:
    alpha = alpha_of(state)
    return f"""import torch
from intention import discriminant, kernels

rows = torch.tensor({listing(state["points"])}, dtype=torch.float64).reshape(-1, 3)
key, (names, labels) = rows[:, :2], rows[:, 2].long().unique(return_inverse=True)
side = torch.linspace({-REACH}, {REACH}, {GRID}, dtype=torch.float64)
query = torch.cartesian_prod(side, side)

classifiers = {{
    "ls_svm": discriminant.ls_svm(key, labels, alpha={alpha!r}),
    "lda": discriminant.lda(key, labels, alpha={alpha!r}),
    "qda": discriminant.qda(key, labels, alpha={alpha!r}),
    "kernel": discriminant.ls_svm(key, labels, alpha={alpha!r}, kernel=kernels.Gaussian({10.0 ** state["gamma"]!r})),
}}
found = {{name: names[classifier.predict(query)] for name, classifier in classifiers.items()}}
"""


def draw(state: State, answered: Json) -> Figure:
    return regions(PANELS, answered, state["points"])


SCENE = Scene(
    name="classes",
    title="Classes",
    lead="Classification by least squares: one linear solve each, no iterations. Ringed points are suspects: the fit "
    "without a point gives it another class.",
    ask="Put a point of one colour among those of another, and see which classifiers suspect it.",
    paper="Proposition 3.3",
    docs=(
        "docs/context.md",
        {f"discriminant.{name}": getattr(discriminant, name) for name in ("ls_svm", "lda", "qda")},
    ),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
