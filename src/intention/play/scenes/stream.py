"""Stream: a line that drifts arrives point by point. A state of constant size that forgets, against a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention import CausalState, causal_intention
from intention import functional as F
from intention.lab.core.results import Json
from intention.play.fields import Number, State
from intention.play.scenes.base import DTYPE, Panel, Scene, numbers
from intention.play.scenes.drawing import panel_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCENE"]

LENGTH, Y = 240, (-3.0, 3.0)
PANELS = {
    "now": Panel("The line now", "q (S + [alpha:α] I)⁻¹ B,  S ← [forget:γ] S + k kᵀ,  B ← [forget:γ] B + k vᵀ", ""),
    "errors": Panel("Error so far", "mean of (next value − its prediction)², over the last 20", ""),
}
NAMES = {"forgetting": "Intention, forgetting γ", "all": "Intention, all points", "window": "Attention, a window"}
FIELDS = {
    "at": Number("points that have arrived", 2, LENGTH - 1, 90, 1),
    "forget": Number("γ: what a step leaves of the past", 0.5, 1, 0.93, 0.005),
    "drift": Number("drift of the line", 0, 1, 0.5, 0.01),
    "noise": Number("noise", 0, 1, 0.25, 0.01),
    "window": Number("window of attention", 2, 60, 20, 1),
    "temperature": Number("softmax sharpness τ", -1, 3, 1, 0.05, power=True),
    "alpha": Number("regularisation α", -6, 2, -3, 0.05, power=True),
    "seed": Number("another stream", 0, 99, 0, 1),
}


def stream(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [x, 1] (T, 2), values (T, 1) and the true lines (T, 2): slope and offset turn, and jump once."""
    generator = torch.Generator().manual_seed(int(state["seed"]))
    x = 2 * torch.rand(LENGTH, generator=generator, dtype=DTYPE) - 1
    noise = torch.randn(LENGTH, generator=generator, dtype=DTYPE)
    angle = 0.08 * state["drift"] * torch.arange(LENGTH, dtype=DTYPE) + 6 * torch.rand(1, generator=generator)
    jump = torch.where(torch.arange(LENGTH) < LENGTH * 0.6, 1.0, -1.0)
    line = torch.stack([1.6 * angle.cos() * jump, 0.9 * (1.3 * angle).sin()], -1)
    key = torch.stack([x, torch.ones_like(x)], -1)
    return key, (key * line).sum(-1, keepdim=True) + 0.6 * state["noise"] * noise[:, None], line


def predictions(state: State, key: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Of each value by what came before it, (T - 1,)."""
    query, past, seen = key[1:], key[:-1], value[:-1]
    alpha = 10.0 ** state["alpha"]
    decay = torch.full((len(past),), state["forget"], dtype=DTYPE)
    place = torch.arange(len(past))
    age = place[:, None] - place  # (query, key)
    near = (age >= 0) & (age < int(state["window"]))
    found = {
        "forgetting": causal_intention(query, past, seen, alpha=alpha, decay=decay),
        "all": causal_intention(query, past, seen, alpha=alpha),
        "window": F.attention(query, past, seen, near, scale=10.0 ** state["temperature"]),
    }
    return {name: x[:, 0] for name, x in found.items()}


def lines(state: State, key: Tensor, value: Tensor, ends: Tensor) -> dict[str, Tensor]:
    """What each says at the ends of the line after the points so far, (2,)."""
    alpha, out = 10.0 ** state["alpha"], {}
    for name, forget in (("forgetting", state["forget"]), ("all", 1.0)):
        decay = torch.full((len(key),), forget, dtype=DTYPE)
        _, kept = CausalState.empty(2, 1, alpha=alpha).prefill(key, key, value, decay=decay)
        nothing = torch.zeros(len(ends), dtype=DTYPE)  # questions that are not learnt from
        out[name] = kept.prefill(ends, torch.zeros_like(ends), nothing[:, None], weight=nothing)[0][:, 0]
    last = int(state["window"])
    out["window"] = F.attention(ends, key[-last:], value[-last:], scale=10.0 ** state["temperature"])[:, 0]
    return out


def answer(state: State) -> Json:
    at = int(state["at"])
    key, value, line = stream(state)
    ends = torch.stack([torch.linspace(-1, 1, 41, dtype=DTYPE), torch.ones(41, dtype=DTYPE)], -1)
    predicted = predictions(state, key, value)
    errors = {name: (x - value[1:, 0]).square() for name, x in predicted.items()}
    window = int(state["window"])
    return {
        "x": numbers(ends[:, 0], 3),
        "points": numbers(torch.cat([key[:at, :1], value[:at]], -1), 3),
        "true": numbers(ends @ line[at - 1], 4),
        "found": {name: numbers(y) for name, y in lines(state, key[:at], value[:at], ends).items()},
        "errors": {name: numbers(running(x), 4) for name, x in errors.items()},
        "mean": {name: float(f"{x[: at - 1].mean().item():.3g}") for name, x in errors.items()},
        "memory": {"forgetting": 2 * 2 + 2, "all": 2 * 2 + 2, "window": 3 * min(window, at)},
    }


def running(x: Tensor, over: int = 20) -> Tensor:
    """The mean of the last so many, from the first on."""
    total = torch.cat([x.new_zeros(1), x.cumsum(0)])
    start = (torch.arange(len(x)) + 1 - over).clamp_min(0)
    stop = torch.arange(len(x)) + 1
    return (total[stop] - total[start]) / (stop - start)


def code(state: State) -> str:
    at, alpha, sharp = int(state["at"]), 10.0 ** state["alpha"], 10.0 ** state["temperature"]
    given = {name: state[name] for name in ("seed", "drift", "noise")}
    return f"""import torch
from intention import CausalState, functional as F
from intention.play.scenes.stream import stream

key, value, line = stream({given!r})
key, value = key[:{at}], value[:{at}]  # what has arrived
x = torch.linspace(-1, 1, 41, dtype=torch.float64)
query = torch.stack([x, torch.ones_like(x)], -1)
nothing = torch.zeros(41, dtype=torch.float64)  # the weight of questions: they are not learnt from


def answers(forget):
    decay = torch.full(({at},), forget, dtype=torch.float64)
    _, state = CausalState.empty(2, 1, alpha={alpha!r}).prefill(key, key, value, decay=decay)
    return state.prefill(query, torch.zeros_like(query), nothing[:, None], weight=nothing)[0][:, 0]


last = {int(state["window"])}
found = {{
    "forgetting": answers({state["forget"]!r}),
    "all": answers(1.0),
    "window": F.attention(query, key[-last:], value[-last:], scale={sharp!r})[:, 0],
}}
"""


def draw(state: State, answered: Json) -> Figure:
    figure, (now, errors) = panel_axes(["the line now", "error over the last 20"], 2, 3.0)
    colours = {"forgetting": "#E08A00", "all": "#A35F00", "window": "#2F7FD1"}
    for name, colour in colours.items():
        now.plot(answered["x"], answered["found"][name], color=colour, label=NAMES[name])
        errors.plot(answered["errors"][name][: int(state["at"]) - 1], color=colour)
    now.plot(answered["x"], answered["true"], ":", color="black")
    now.plot(*zip(*answered["points"][-60:], strict=True), ".", color="black", alpha=0.5)
    now.set(ylim=Y)
    now.legend(fontsize=7, frameon=False)
    return figure


SCENE = Scene(
    name="stream",
    title="Stream",
    lead="A line drifts and, after 144 points, turns over. Intention keeps 6 numbers, whatever has arrived, and "
    "forgets by γ; attention keeps a window of points.",
    ask="Let it run, then move γ: 1 remembers everything and is slow to see the drift, 0.8 follows and is noisy.",
    paper="section 2, the fit that is updated here",
    docs=("docs/sequences.md", {"CausalState": CausalState, "causal_intention": causal_intention}),
    panels=PANELS,
    fields=FIELDS,
    answer=answer,
    code=code,
    draw=draw,
)
