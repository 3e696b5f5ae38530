"""nn.Intention, nn.SigmaIntention, nn.LinearAttention: w, a module on w, kernels, named scales."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fuzz import context, oracle
from fuzz.draw import HALF, Case, Draw, Tensors
from intention import kernels
from intention.nn import Intention, LinearAttention, SigmaIntention


class Double(nn.Module):
    """A module on w."""

    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    dtype, _ = draw.dtype()
    kind = draw.choice(("intention", "sigma", "linear", "kernel"), (0.6, 0.15, 0.1, 0.15))
    lead = draw.choice(((), (2,), (2, 3)), (0.4, 0.3, 0.3))
    n, d, m, k = draw.integer(1, 22), draw.integer(1, 13), draw.integer(1, 9), draw.integer(1, 4)
    covariance = draw.choice(("ridge", "convex"), (0.7, 0.3)) if kind in ("intention", "sigma") else "ridge"
    intercept = kind != "linear" and draw.chance(0.5)
    how = draw.choice(("plain", "return_w", "embed_w")) if kind in ("intention", "linear") else "plain"
    alpha = draw.alpha(covariance, 1e-3 if kind in ("kernel", "sigma") else 1e-6)
    alpha = 0.5 if alpha == 1.0 and covariance == "convex" else alpha
    scale = None
    if kind in ("intention", "sigma") and not intercept:
        scale = draw.choice((None, "variance", "attention", 0.7))
    key, text = draw.keys(lead, n, d, dtype, easy=kind in ("kernel", "sigma"))
    if kind == "kernel":
        key = key / key.abs().amax()
    tensors: Tensors = {
        "query": draw.queries(lead, m, key, 0.7),
        "key": key,
        "value": draw.values(lead, key, k),
    }
    if intercept and draw.chance(0.5):
        tensors["query"] = tensors["query"] + key.mean(-2, keepdim=True)
    if draw.chance(0.3) and kind != "linear":
        tensors["weight"] = draw.weights(lead, n)
    if draw.chance(0.3):
        tensors["mask"] = (draw.rand(*draw.choice((lead, ())), 1, n) > 0.3).double()
    label = (
        f"{kind} {how} n={n} d={d} m={m} k={k} lead={lead} {covariance} alpha={alpha:g} scale={scale} "
        f"intercept={intercept} {text} {sorted(tensors)}"
    )
    settings = {"intercept": intercept, "covariance": covariance, "scale": scale}
    kinds = {"mask": torch.bool, "weight": torch.float64 if dtype == torch.float64 else torch.float32}
    return Case(
        "heads",
        label,
        dtype,
        tensors,
        lambda t: call(kind, how, t, settings, alpha),
        lambda t: expected(kind, how, t, settings, alpha),
        tuple(x for x in tensors if x != "mask"),
        # w is of the dtype of the call: query @ w, and a scaled query, round in it
        allowance=0.0 if dtype not in HALF or (how == "plain" and not isinstance(scale, str)) else 0.05,
        kinds=kinds,
    )


def call(kind: str, how: str, t: Tensors, settings: dict[str, Any], alpha: float) -> Tensors:
    embed = {"embed_w": Double()} if how == "embed_w" else {}
    inputs, mask = (t["query"], t["key"], t["value"]), t.get("mask")
    if kind == "linear":
        head: Any = LinearAttention(**embed)
        found = head(*inputs, mask, return_w=how == "return_w")
    elif kind == "sigma":
        found = SigmaIntention(alpha, **settings)(*inputs, mask, weight=t.get("weight"))
    elif kind == "kernel":
        head = Intention(alpha, intercept=settings["intercept"], kernel=kernels.Gaussian(gamma=0.5))
        found = head(*inputs, mask, weight=t.get("weight"))
    else:
        head = Intention(alpha, **settings, **embed)
        found = head(*inputs, mask, weight=t.get("weight"), return_w=how == "return_w")
    return {"out": found[0], "w": found[1]} if how == "return_w" else {"out": found}


def expected(kind: str, how: str, t: Tensors, settings: dict[str, Any], alpha: float) -> Tensors:
    query, key, value = t["query"], t["key"], t["value"]
    count = t.get("weight", torch.ones(key.shape[:-1], dtype=torch.float64)).expand(key.shape[:-1])
    if "mask" in t:
        count = count * t["mask"][..., 0, :]
    a = torch.full(key.shape[:-2], alpha, dtype=torch.float64)
    covariance, intercept = settings["covariance"], settings["intercept"]
    factor = named(settings["scale"], (count > 0).sum(-1), key.shape[-1], alpha, covariance)
    if kind == "linear":
        w = key.mT @ (count[..., None] * value)
        return result(how, oracle.cancels(query @ w, query.abs() @ w.abs()), w)
    if kind == "kernel":
        return {"out": context.kernel_fit(query, key, value, count, a, intercept, "gaussian")}
    if kind == "sigma":
        return {"out": oracle.sigma_intention(query * factor, key, value, count, a, intercept, covariance)}
    out = oracle.intention(query, key, value, count, a, intercept, covariance)
    d = key.shape[-1]
    centre, mean = (oracle.mean(x, count) for x in (key, value))
    unit = torch.eye(d, dtype=torch.float64).expand(*key.shape[:-2], d, d)
    if not intercept:
        w = oracle.intention(unit, key, value, count, a, False, covariance)
        out = out if how == "plain" else oracle.cancels(out, query.abs() @ w.abs())  # w is rounded
        return result(how, out * factor, w * factor)
    w = oracle.intention(unit + centre, key, value, count, a, True, covariance) - mean
    out = out if how == "plain" else oracle.cancels(out, (query - centre).abs() @ w.abs() + mean.abs())
    constant = oracle.cancels(mean - centre @ w, mean.abs() + centre.abs() @ w.abs())
    return result(how, out, torch.cat([w, constant], -2))


def result(how: str, out: Tensor, w: Tensor) -> Tensors:
    if how == "plain":
        return {"out": out}
    return {"out": out, "w": w} if how == "return_w" else {"out": 2 * out}


def named(scale: Any, n: Tensor, d: int, alpha: float, covariance: str) -> Any:
    """The factor of a scale by name, (..., 1, 1), for n points."""
    if scale is None or not isinstance(scale, str):
        return 1.0 if scale is None else scale
    if scale == "attention":
        return alpha / math.sqrt(d)
    n = n.double()[..., None, None]
    closed = torch.where(n > d, n * (n - d - 1) / d, d - n - 1)
    factor = torch.maximum(closed, 2 * n.clamp(1, d).sqrt()).sqrt()
    if scale == "output":
        factor = factor / n.clamp_min(1).sqrt()
        factor = torch.where(n > d, factor.clamp_max(1.0), factor)
    return factor * ((1 - alpha) if covariance == "convex" else 1.0)
