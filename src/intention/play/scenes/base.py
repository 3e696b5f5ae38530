"""What a scene is, and what scenes share."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from intention.lab.core.results import Json
from intention.play import fields
from intention.play.fields import Fields, Number, State

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ALPHA", "DTYPE", "Panel", "Ridge", "Scene", "alpha_field", "listing", "numbers", "tensor"]

ALPHA = (-6.0, 6.0)  # powers of ten; the ends are 0 and infinity
DTYPE = torch.float64


class Panel(NamedTuple):
    """One picture of a scene. In a formula [alpha:α] is lit when the field alpha changes."""

    title: str
    formula: str = ""
    colour: str = ""  # a key of lab.experiments.base.COLOURS


@dataclass(frozen=True)
class Scene:
    """`answer` gives what the page draws; its part `found` is what `code`, run by itself, computes under that name."""

    name: str
    title: str
    lead: str  # what is seen
    ask: str  # what to try
    paper: str  # the place in the paper
    docs: tuple[str, Mapping[str, object]]  # the page of our documentation, and what it describes by name
    panels: Mapping[str, Panel]
    fields: Fields
    answer: Callable[[State], Json]
    code: Callable[[State], str]
    draw: Callable[[State, Json], Figure]

    def about(self) -> Json:
        """For the page."""
        page, things = self.docs
        texts = {name: f"{name}{_signature(thing)}\n\n{inspect.getdoc(thing)}" for name, thing in things.items()}
        return {
            **{name: getattr(self, name) for name in ("name", "title", "lead", "ask", "paper")},
            "docs": {"page": page, "texts": texts},
            "panels": {name: panel._asdict() for name, panel in self.panels.items()},
            "fields": fields.about(self.fields),
        }

    def compute(self, state: State) -> Json:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a fit of two points at one place is shown as it is
            return self.answer(state)


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing)) if callable(thing) else ""
    except ValueError:
        return ""


def alpha_field(default: float, hint: str = "") -> Number:
    return Number("regularisation α", *ALPHA, default, 0.05, power=True, ends=("0", "∞"), hint=hint)


class Ridge(NamedTuple):
    """How Sigma is made: K'WK + alpha I, or (1 - alpha) K'WK + alpha I, which is that divided by 1 + alpha."""

    alpha: float
    covariance: str

    @staticmethod
    def of(power: float, towards_attention: bool) -> Ridge:
        """alpha from the slider's power of ten; its ends are 0 and infinity.

        Towards attention Q Sigma^-1 is multiplied by 1 + alpha, which "convex" does: lambda = alpha / (1 + alpha).
        """
        alpha = 0.0 if power <= ALPHA[0] else math.inf if power >= ALPHA[1] else 10.0**power
        if not towards_attention:
            return Ridge(min(alpha, 1e12), "ridge")
        return Ridge(1.0 if alpha == math.inf else alpha / (1 + alpha), "convex")


def tensor(rows: object) -> Tensor:
    return torch.tensor(rows, dtype=DTYPE)


def numbers(x: Tensor, digits: int = 5) -> Any:
    """Nested lists, rounded; what is not finite is None, for JSON has no word for it."""
    listed = x.double().round(decimals=digits).tolist()
    return listed if bool(torch.isfinite(x).all()) else _finite(listed)


def _finite(x: Any) -> Any:
    if isinstance(x, list):
        return [_finite(item) for item in x]
    return x if math.isfinite(x) else None


def listing(rows: object) -> str:
    """Numbers as Python writes them, 110 characters a line."""
    text, lines = repr(rows).replace("(", "[").replace(")", "]"), [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) > 105:
            lines.append("   ")
        lines[-1] += (" " if lines[-1] else "") + word
    return "\n".join(lines)
