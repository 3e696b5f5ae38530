"""causal_intention, and CausalState by prefills and steps: weights, decay, packed sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz import oracle
from fuzz.draw import Case, Draw, Tensors
from intention import CausalState, causal_intention


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    dtype, _ = draw.dtype()
    lead = draw.choice(((), (2,), (2, 3), (1, 2, 1)), (0.3, 0.3, 0.3, 0.1))
    shape = draw.choice(("short", "long", "wide", "empty"), (0.7, 0.1, 0.18, 0.02))
    n, d, k = draw.integer(1, 24), draw.integer(1, 9), draw.integer(1, 5)
    if shape == "long":
        lead, n, d = (), draw.integer(60, 140), draw.integer(1, 5)
    if shape == "wide":
        lead, n, d = lead[:1], draw.integer(1, 12), draw.integer(10, 40)
    n = 0 if shape == "empty" else n
    covariance = draw.choice(("ridge", "convex"), (0.7, 0.3))
    alpha = draw.alpha(covariance, 1e-6)
    key, text = draw.keys(lead, n, d, dtype)
    tensors: Tensors = {"query": draw.queries(lead, n, key, 0.5), "key": key, "value": draw.values(lead, key, k)}
    if grad or draw.chance(0.4):
        one = draw.choice(((), lead[len(lead) - 1 :]))
        tensors["alpha"] = torch.full(one, alpha, dtype=torch.float64)
    if draw.chance(0.4):
        tensors["weight"] = draw.weights(draw.choice((lead, ())), n)
    if draw.chance(0.4):
        least = draw.choice((0.99, 0.9, 0.3))
        decay = least + (1 - least) * draw.rand(*draw.choice((lead, ())), n)
        tensors["decay"] = torch.where(draw.rand(*decay.shape) < 0.1, 1.0, decay)
    how = draw.choice(("whole", "packed", "cuts"), (0.45, 0.2, 0.35))
    cuts: list[int] = []
    if how != "whole":
        cuts = sorted(draw.integer(0, n) for _ in range(draw.integer(1, 3)))
    scale = draw.choice((None, 0.7))
    label = f"{how} {cuts} n={n} d={d} k={k} lead={lead} {covariance} alpha={alpha:g} scale={scale} {text} " + " ".join(
        f"{name}={tuple(tensors[name].shape)}" for name in ("alpha", "weight", "decay") if name in tensors
    )
    fixed: dict[str, Any] = {"covariance": covariance, "scale": scale}
    kinds = dict.fromkeys(("alpha", "weight", "decay"), torch.float64 if dtype == torch.float64 else torch.float32)
    return Case(
        "causal",
        label,
        dtype,
        tensors,
        lambda t: call(t, fixed, alpha, how, cuts, lead),
        lambda t: expected(t, fixed, alpha, how, cuts, lead),
        tuple(tensors),
        kinds=kinds,
        refusals=("is too small beside this state",) if how == "cuts" else (),
    )


def call(t: Tensors, fixed: dict[str, Any], alpha: float, how: str, cuts: list[int], lead: Any) -> Tensors:
    n, d, k = *t["key"].shape[-2:], t["value"].shape[-1]
    gates = {name: t.get(name) for name in ("weight", "decay")}
    a: Any = t.get("alpha", alpha)
    if how != "cuts":
        ends = torch.tensor([0, *cuts, n]) if how == "packed" else None
        return {"out": causal_intention(t["query"], t["key"], t["value"], alpha=a, **gates, **fixed, cu_seqlens=ends)}
    state = CausalState.empty(d, k, lead, alpha=a, covariance=fixed["covariance"])
    outs, start = [], 0
    for end in (*cuts, n):
        tokens = [t[x][..., start:end, :] for x in ("query", "key", "value")]
        rest = {x: None if y is None else y[..., start:end] for x, y in gates.items()}
        if end - start == 1:
            rest = {x: None if y is None else y[..., 0] for x, y in rest.items()}
            out, state = state.step(*(x[..., 0, :] for x in tokens), **rest, scale=fixed["scale"])
            outs.append(out.unsqueeze(-2))
        elif end > start:
            out, state = state.prefill(*tokens, **rest, scale=fixed["scale"])
            outs.append(out)
        start = end
    out = torch.cat(outs, -2) if outs else t["query"] @ (t["key"].mT @ t["value"])
    return {"out": out, "gram": state.gram, "cross": state.cross}


def expected(t: Tensors, fixed: dict[str, Any], alpha: float, how: str, cuts: list[int], lead: Any) -> Tensors:
    query, key, value = t["query"], t["key"], t["value"]
    n = key.shape[-2]
    a = t.get("alpha", torch.tensor(alpha, dtype=torch.float64)).expand(lead)
    if n == 0:
        nothing = key.mT @ value
        sums = {"gram": key.mT @ key, "cross": nothing} if how == "cuts" else {}
        return {"out": query @ nothing, **sums}
    weight, decay = t.get("weight", torch.ones(n, dtype=torch.float64)), t.get("decay")
    table = oracle.decayed(weight, decay, cuts if how == "packed" else None).expand(*lead, n, n)
    scale = 1.0 if fixed["scale"] is None else fixed["scale"]
    out = oracle.each(oracle.intention, query, key, value, table, a, covariance=fixed["covariance"], scale=scale)
    if how != "cuts":
        return {"out": out}
    left: Tensor = table[..., -1, :, None]  # what is left of every token after the last
    return {"out": out, "gram": key.mT @ (left * key), "cross": key.mT @ (left * value)}
