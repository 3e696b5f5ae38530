"""Multi-head mixers: forward with masks, the map, and streams in pieces."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from fuzz import oracle
from fuzz.draw import HALF, Case, Draw, Tensors, laid_out
from fuzz.heads import named
from intention.nn import MultiheadAttention, MultiheadDelta, MultiheadIntention, MultiheadLinearAttention

KINDS: dict[str, Any] = {
    "intention": MultiheadIntention,
    "sigma": MultiheadIntention,
    "attention": MultiheadAttention,
    "linear": MultiheadLinearAttention,
    "delta": MultiheadDelta,
}


class Projections(NamedTuple):
    """How a half-precision module comes by its queries, keys and values, so that they can be had again bit by bit."""

    dtype: torch.dtype
    pieces: list[int]  # of a stream: torch's product may round each number differently, by shape and storage
    seed: int
    names: list[str]

    def given(self, t: Tensors, name: str) -> Tensor:
        return laid_out(t[name].to(self.dtype), self.seed + self.names.index(name))


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    kind = draw.choice(tuple(KINDS), (0.35, 0.3, 0.1, 0.15, 0.1))
    dtype = draw.choice((torch.float32, torch.float64, *HALF), (0.6, 0.2, 0.1, 0.1))
    heads, size = draw.integer(1, 3), draw.integer(1, 5)
    width, batch = heads * size, draw.integer(1, 3)
    n, m = draw.integer(1, 13), draw.integer(1, 9)
    how = draw.choice(("self", "cross", "stream"))
    how = "stream" if kind == "delta" else how
    m = m if how == "cross" else n
    covariance = draw.choice(("convex", "ridge"))
    fixed: dict[str, Any] = {}
    if kind in ("intention", "sigma"):
        fixed = {"alpha": draw.alpha(covariance, 1e-3), "covariance": covariance}
        fixed["alpha"] = 0.5 if fixed["alpha"] == 1 and covariance == "convex" else fixed["alpha"]
        fixed["scale"] = draw.choice(("auto", "attention", None, 0.7))
        fixed["softmax"] = kind == "sigma"
    tensors: Tensors = {"x": draw.normal(batch, n, width) * draw.choice((0.3, 1.0, 3.0))}
    if how == "cross":
        tensors["y"] = draw.normal(batch, m, width)
    tensors["in"], tensors["out"] = draw.normal(3 * width, width) / width**0.5, draw.normal(width, width) / width**0.5
    tensors["bias"] = draw.normal(3 * width) * 0.1
    if kind == "delta":
        tensors["strength"] = draw.normal(heads, width)
    options: dict[str, Any] = {"need_weights": draw.chance(0.3), "is_causal": False}
    if how != "stream":
        if draw.chance(0.3):
            hidden = draw.rand(batch, n) < 0.3
            tensors["padding"] = hidden.double()
        mask = draw.choice(("none", "bool", "float", "causal"), (0.5, 0.15, 0.15, 0.2))
        if mask == "bool":
            tensors["mask"] = (draw.rand(m, n) < 0.3).double()
        elif mask == "float":
            tensors["mask"] = draw.rand(m, n) * 3 - 2
        elif mask == "causal":
            tensors["mask"] = 1 - torch.ones(m, n, dtype=torch.float64).tril()
            options["is_causal"] = True
        options["mask"] = mask
    cuts = sorted(draw.integer(0, n) for _ in range(draw.integer(0, 3)))
    ends = sorted({*cuts, n} - {0}) if how == "stream" else [n]
    pieces = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    half = Projections(dtype, pieces, seed, list(tensors)) if dtype in HALF else None
    label = (
        f"{kind} {how} heads={heads} width={width} batch={batch} n={n} m={m} {fixed} {options} cuts={cuts} "
        f"{list(tensors)}"
    )
    kinds = {"padding": torch.bool}
    if options.get("mask") in ("bool", "causal"):
        kinds["mask"] = torch.bool
    return Case(
        "mixers",
        label,
        dtype,
        tensors,
        lambda t: call(kind, how, t, heads, fixed, options, cuts),
        lambda t: expected(kind, how, t, heads, fixed, options, half),
        tuple(x for x in tensors if x not in kinds),
        # what comes after the projections is rounded once or twice more, and a gradient on its way back
        allowance=(0.1 if grad else 0.02) if dtype in HALF else 0.0,
        kinds=kinds,
    )


def call(
    kind: str, how: str, t: Tensors, heads: int, fixed: dict[str, Any], options: dict[str, Any], cuts: list[int]
) -> Tensors:
    x = t["x"]
    mixer = KINDS[kind](x.shape[-1], heads, batch_first=True, dtype=x.dtype, **fixed)
    given = {"in_proj_weight": t["in"], "in_proj_bias": t["bias"], "out_proj.weight": t["out"]}
    given["out_proj.bias"] = torch.zeros_like(x[0, 0])
    if kind == "delta":
        given |= {"strength.weight": t["strength"], "strength.bias": torch.zeros_like(t["strength"][:, 0])}

    class Streamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = mixer

        def forward(self, x: Tensor) -> Tensor:
            outs, before, start = [], None, 0
            for end in (*cuts, x.shape[1]):
                if end > start:
                    out, before = self.mixer.stream(x[:, start:end], before)
                    outs.append(out)
                start = end
            return torch.cat(outs, 1)

    if how == "stream":
        named_given = {f"mixer.{name}": y for name, y in given.items()}
        return {"out": torch.func.functional_call(Streamed(), named_given, (x,))}
    passed = {name: options[name] for name in ("need_weights", "is_causal")}
    passed |= {"key_padding_mask": t.get("padding"), "attn_mask": t.get("mask")}
    query = t["y"] if how == "cross" else x
    out, weights = torch.func.functional_call(mixer, given, (query, x, x), passed)
    return {"out": out, "map": weights} if options["need_weights"] else {"out": out}


def projected(query: Tensor, x: Tensor, t: Tensors, half: Projections | None) -> list[Tensor]:
    """Queries, keys and values. Those of a half-precision module are torch's, whose rounding a fit may depend on."""
    parts = zip((query, x, x), t["in"].chunk(3), t["bias"].chunk(3), strict=True)
    exact = [TF.linear(y, w, b) for y, w, b in parts]
    if half is None:
        return exact
    with torch.no_grad():
        x, w, b = (half.given(t, name) for name in ("x", "in", "bias"))
        if "y" in t:
            given = zip((half.given(t, "y"), x, x), w.chunk(3), b.chunk(3), strict=True)
            rounded = [TF.linear(*part) for part in given]
        else:
            rounded = torch.cat([TF.linear(piece, w, b) for piece in x.split(half.pieces, 1)], 1).chunk(3, -1)
    return [y + (r - y).detach() for y, r in zip(exact, rounded, strict=True)]


def expected(
    kind: str,
    how: str,
    t: Tensors,
    heads: int,
    fixed: dict[str, Any],
    options: dict[str, Any],
    half: Projections | None,
) -> Tensors:
    x = t["x"]
    query = t["y"] if how == "cross" else x
    q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in projected(query, x, t, half))
    (m, d), n, batch = q.shape[-2:], k.shape[-2], len(x)
    count = torch.ones(batch, heads, m, n, dtype=torch.float64)
    if how == "stream":
        count = count.tril()
    if "padding" in t:
        count = count * (~t["padding"].bool()).double()[:, None, None, :]
    if "mask" in t:
        count = count * (t["mask"].exp() if options["mask"] == "float" else (~t["mask"].bool()).double())

    def mix(v: Tensor) -> Tensor:
        seen = (count > 0).sum(-1)
        if kind == "attention":
            return oracle.attention(q, k, v, count)
        if kind == "linear":
            return oracle.linear_attention(q / (d * seen.clamp_min(1))[..., None].sqrt(), k, v, count)
        if kind == "delta":
            return delta(q, k, v, torch.sigmoid(x @ t["strength"].mT).transpose(1, 2))
        scale = fixed["scale"]
        if scale == "auto":
            scale = "variance" if fixed["softmax"] else "output"
        factor = named(scale, seen, d, fixed["alpha"], fixed["covariance"])
        factor = factor[..., 0] if isinstance(factor, Tensor) else factor
        alpha = torch.full(q.shape[:2], fixed["alpha"], dtype=torch.float64)
        operation = oracle.sigma_intention if fixed["softmax"] else oracle.intention
        return oracle.each(operation, q * factor, k, v, count, alpha, covariance=fixed["covariance"])

    out = TF.linear(mix(v).transpose(1, 2).flatten(-2), t["out"])
    if how == "stream" or not options["need_weights"]:
        return {"out": out}
    return {"out": out, "map": mix(torch.eye(n, dtype=torch.float64).expand(*k.shape[:-1], n)).mean(1)}


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """S + beta k (v - k'S)', token by token"""
    q, k = TF.normalize(q, dim=-1), TF.normalize(k, dim=-1)
    sums, outs = torch.zeros(*k.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float64), []
    for i in range(k.shape[-2]):
        row = k[..., i : i + 1, :]
        sums = sums + row.mT @ (beta[..., i, None, None] * (v[..., i : i + 1, :] - row @ sums))
        outs.append(q[..., i : i + 1, :] @ sums)
    return torch.cat(outs, -2)
