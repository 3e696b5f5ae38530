"""F.intention, F.sigma_intention, F.linear_attention and F.attention with every option."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz import oracle
from fuzz.draw import HALF, Case, Draw, Tensors
from intention import functional as F

OPS = ("intention", "sigma_intention", "linear_attention", "attention")
LEADS = ((), (2,), (3, 2), (2, 1, 2), (1, 2, 1, 2))


def diagonal(key: Tensor, value: Tensor, weight: Tensor | None) -> Tensor:
    """A covariance of the user's own."""
    square = key.square() if weight is None else weight.unsqueeze(-1) * key.square()
    return torch.diag_embed(square.sum(-2))


def narrower(draw: Draw, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Leading dimensions that broadcast to `lead`."""
    if draw.chance(0.6):
        return lead
    some = tuple(1 if draw.chance(0.4) else x for x in lead)
    return some[draw.integer(0, len(some)) :] if draw.chance(0.5) else some


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    op = draw.choice(OPS, (0.5, 0.3, 0.1, 0.1))
    fits, dtype, autocast = op in OPS[:2], *draw.dtype()
    causal = draw.chance(0.2)
    mask = draw.choice(("none", "bool", "float", "bool each", "float each"), (0.5, 0.15, 0.15, 0.1, 0.1))
    if causal and "each" in mask:
        mask = "none"
    own = causal or "each" in mask
    covariance = draw.choice(("ridge", "convex", "within", "diagonal"), (0.6, 0.2, 0.1, 0.1)) if fits else "ridge"
    if own and covariance == "diagonal":
        covariance = "ridge"
    lead = draw.choice(LEADS, (0.2, 0.25, 0.3, 0.15, 0.1))
    n, m, d, k = sizes(draw, own and fits, lead)
    gqa = len(lead) > 0 and lead[-1] == 2 and draw.chance(0.25)
    if gqa:
        lead = (*lead[:-1], 4)
        q_lead, kv_lead = lead, (*lead[:-1], draw.choice((1, 2, 4)))
    else:
        q_lead, kv_lead = narrower(draw, lead), narrower(draw, lead)
    key, text = draw.keys(kv_lead, n, d, dtype)
    seen = key.repeat_interleave(lead[-1] // kv_lead[-1], -3) if gqa else key
    tensors: Tensors = {
        "query": draw.queries(q_lead, m, seen, 0.8 if op == "sigma_intention" else 0.5),
        "key": key,
        "value": draw.values(kv_lead, key, k),
    }
    if covariance == "within":
        labels = torch.randint(0, k, (*kv_lead, n), generator=draw.gen)
        tensors["value"] = torch.nn.functional.one_hot(labels, k).double()
    if op == "attention":  # scores of an ordinary size: a softmax of one key tells little
        scale = tensors["query"].square().mean().sqrt() * tensors["key"].square().mean().sqrt()
        tensors["query"] = tensors["query"] * 2 / scale.clamp_min(1e-9) if n else tensors["query"]
    lead = tuple(torch.broadcast_shapes(q_lead, kv_lead)) if not gqa else lead
    options: dict[str, Any] = {"is_causal": causal, "enable_gqa": gqa}
    options["scale"] = draw.choice((None, 0.7))
    options["garbage"] = False
    if mask != "none":
        mask_lead = draw.choice((lead, lead[len(lead) - 1 :], ()))
        rows = m if "each" in mask else 1
        if "bool" in mask:
            tensors["mask"] = (draw.rand(*mask_lead, rows, n) > 0.3).double()
            options["garbage"] = not own and n > 0 and draw.chance(0.3)
        else:
            logs = draw.rand(*mask_lead, rows, n) * 4 - 3
            tensors["mask"] = torch.where(draw.rand(*mask_lead, rows, n) < 0.2, -torch.inf, logs)
    intercept = fits and draw.chance(0.25)
    alpha = 0.0
    if fits:
        options |= {"intercept": intercept, "covariance": covariance}
        least = 1e-6 if grad or covariance in ("within", "diagonal") or (causal and not intercept) else 0.0
        alpha = draw.alpha(covariance, 1e-3 if dtype in HALF and op == "sigma_intention" else least)
        if grad or draw.chance(0.3):
            shape = draw.choice(((), lead[len(lead) - 1 :]))
            tensors["alpha"] = torch.full(shape, alpha, dtype=torch.float64)
        if draw.chance(0.3):
            tensors["weight"] = draw.weights(draw.choice((kv_lead, ())), n)
    label = (
        f"{op} q={(*q_lead, m, d)} kv={(*kv_lead, n)} k={k} alpha={alpha:g} mask={mask} {text} "
        + " ".join(f"{name}={x}" for name, x in options.items() if x not in (None, False, "ridge"))
        + ("" if "weight" not in tensors else f" weight={tuple(tensors['weight'].shape)}")
        + ("" if "alpha" not in tensors else f" alpha tensor {tuple(tensors['alpha'].shape)}")
    )
    kinds = {"alpha": torch.float64 if dtype == torch.float64 else torch.float32}
    if "mask" in tensors and "bool" in mask:
        kinds["mask"] = torch.bool
    elif draw.chance(0.3):
        kinds["mask"] = torch.float32
    leaves = [x for x in tensors if x != "mask" or "float" in mask]
    if covariance == "within":
        leaves.remove("value")
    half_softmax = op == "attention" and (autocast or dtype in HALF)
    return Case(
        "functional",
        label,
        dtype,
        tensors,
        lambda t: {"out": call(op, t, options, alpha)},
        lambda t: {"out": expected(op, as_autocast(t) if op == "attention" and autocast else t, options, alpha)},
        tuple(leaves),
        autocast,
        allowance=(2**-6 if autocast or dtype == torch.bfloat16 else 2**-9) if half_softmax else 0.0,
        kinds=kinds,
    )


def as_autocast(t: Tensors) -> Tensors:
    """What torch's own attention reads under autocast: a score of 40 moves by .1 when its query and key are rounded."""
    return {name: x if x.dtype == torch.bool else x.bfloat16().double() for name, x in t.items()}


def sizes(draw: Draw, own: bool, lead: tuple[int, ...]) -> tuple[int, int, int, int]:
    """N, M, d, k: small where every query has a fit of its own."""
    if draw.chance(0.03):
        return 0, draw.integer(1, 7), draw.integer(1, 7), draw.integer(1, 5)
    if own:
        return draw.integer(1, 13), draw.integer(1, 13), draw.integer(1, 9), draw.integer(1, 5)
    if draw.chance(0.1) and len(lead) < 3:
        return draw.integer(1, 70), draw.integer(1, 23), draw.integer(1, 96), draw.integer(1, 7)
    return draw.integer(1, 24), draw.integer(1, 13), draw.integer(1, 17), draw.integer(1, 7)


def call(op: str, t: Tensors, options: dict[str, Any], alpha: float) -> Tensor:
    passed = {name: x for name, x in options.items() if name != "garbage"}
    key, value, mask = t["key"], t["value"], t.get("mask")
    if op in OPS[:2]:
        passed |= {"alpha": t.get("alpha", alpha), "weight": t.get("weight")}
        if options["covariance"] == "diagonal":
            passed["covariance"] = diagonal
    if options["garbage"] and mask is not None:  # what a mask hides for all may hold anything
        hidden = ~mask.any(-2)
        while hidden.dim() > 1 and hidden.shape[:-1] != key.shape[:-2]:
            hidden = hidden.all(0)
        key, value = (torch.where(hidden.unsqueeze(-1), torch.nan, x) for x in (key, value))
    return getattr(F, op)(t["query"], key, value, mask, **passed)


def expected(op: str, t: Tensors, options: dict[str, Any], alpha: float) -> Tensor:
    query, key, value, mask, weight = (t.get(x) for x in ("query", "key", "value", "mask", "weight"))
    assert query is not None
    assert key is not None
    assert value is not None
    if options["enable_gqa"]:
        groups = query.shape[-3] // key.shape[-3]
        if weight is not None and weight.dim() > 1 and weight.shape[-2] == key.shape[-3]:
            weight = weight.repeat_interleave(groups, -2)
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    a = t.get("alpha", torch.tensor(alpha, dtype=torch.float64))
    lead = torch.broadcast_shapes(
        query.shape[:-2], key.shape[:-2], a.shape, () if weight is None else weight.shape[:-1]
    )
    (m, d), (n, k) = query.shape[-2:], value.shape[-2:]
    query, key, value = query.expand(*lead, m, d), key.expand(*lead, n, d), value.expand(*lead, n, k)
    scale = options["scale"]
    if n == 0:
        return query @ (key.mT @ value)
    own = options["is_causal"] or (mask is not None and mask.shape[-2] > 1)
    count = torch.ones(*lead, m if own else 1, n, dtype=torch.float64)
    if mask is not None:
        count = count * (mask.double() if mask.dtype == torch.bool else mask.exp())
    if weight is not None:
        count = count * weight[..., None, :]
    if options["is_causal"]:
        count = count.tril()
    if op == "linear_attention":
        return oracle.linear_attention(query, key, value, count, 1.0 if scale is None else scale)
    if op == "attention":
        return oracle.attention(query, key, value, count, scale)
    rest = {
        "intercept": options["intercept"],
        "covariance": options["covariance"],
        "scale": 1.0 if scale is None else scale,
    }
    a = a.expand(lead)
    if own:
        return oracle.each(getattr(oracle, op), query, key, value, count, a, **rest)
    return getattr(oracle, op)(query, key, value, count[..., 0, :], a, **rest)
