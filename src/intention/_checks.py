"""Every error message about shapes, dtypes and ranges: what came, what was wanted, what to do."""

from __future__ import annotations

import itertools
import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor

SOLVERS = ("auto", "primal", "dual", "qr", "pinv", "float64")
LABELS = "use value.float(), or for class labels torch.nn.functional.one_hot(value).to(key.dtype)"


def shape(x: Tensor) -> str:
    return "x".join(map(str, x.shape)) or "scalar"


def points(query: Tensor, key: Tensor, value: Tensor) -> None:
    """query (..., M, d), key (..., N, d), value (..., N, k): floating point, one device, shapes that fit."""
    try:
        (*_, _, d), (*_, n, same_d), (*_, same_n, _) = query.shape, key.shape, value.shape
        floating = query.is_floating_point() and key.is_floating_point() and value.is_floating_point()
        if floating and d == same_d > 0 and n == same_n and query.device == key.device == value.device:
            return  # the usual case, in a third of the time of finding out what is wrong
    except (AttributeError, ValueError):
        pass
    for name, x in (("query", query), ("key", key), ("value", value)):
        floating_tensor(name, x)
        if x.dim() < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions (..., points, features), got shape {tuple(x.shape)}"
            )
        if x.device != query.device:
            raise ValueError(f"{name} is on {x.device} but query is on {query.device}; move them with .to(device)")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query and key must have the same number of features d, got query {shape(query)} and key {shape(key)}"
        )
    if key.shape[-1] == 0:
        raise ValueError(f"key must have at least one feature, got shape {tuple(key.shape)}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key and value must have the same number of points N, got key {shape(key)} and value {shape(value)}"
        )


def floating_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; use torch.as_tensor({name})")
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}; {_as_floating(name, x)}")


def _as_floating(name: str, x: Tensor) -> str:
    """The remedy for a tensor that is not floating point."""
    if x.dtype.is_complex:
        return f"split real and imaginary parts, or use {name}.real"
    if name == "value" and x.dtype != torch.bool:
        return (
            "use torch.nn.functional.one_hot(value, C).to(key.dtype) for class labels, value.float() for measurements"
        )
    return f"use {name}.float()"


def fitted_points(
    key: Any,
    value: Any,
    point_weight: Tensor | None = None,
    like: tuple[Tensor, Tensor] | None = None,
    lead: tuple[int, ...] = (),
) -> tuple[int, ...]:
    """key (..., N, d), value (..., N, k), weight (..., N) of a fit; `like`, `lead`: those of a context they belong to.

    Returns the broadcast of their leading dimensions.
    """
    for name, x in (("key", key), ("value", value)):
        floating_tensor(name, x)
    points(key, key, value)
    if like is not None and (key.shape[-1] != like[0].shape[-1] or value.shape[-1] != like[1].shape[-1]):
        raise ValueError(
            f"points must have d = {like[0].shape[-1]} features and k = {like[1].shape[-1]} values like those of the "
            f"context, got key {shape(key)} and value {shape(value)}"
        )
    if like is not None and key.device != like[0].device:
        raise ValueError(f"key is on {key.device} but the context is on {like[0].device}; move it with .to(device)")
    float64(key.device)
    shapes = {"key": key.shape[:-2], "value": value.shape[:-2]}
    if point_weight is not None:
        weight(point_weight, key.device, key.shape[-2])
        shapes["weight"] = point_weight.shape[:-1]
    return leading(**shapes) if like is None else leading(context=lead, **shapes)


def leading(**shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast of leading dimensions."""
    first, *rest = shapes.values()
    if all(len(s) == len(first) and s == first for s in rest):  # == alone compares batches with heads
        return tuple(first)  # torch.broadcast_shapes takes 30 us
    try:
        return tuple(torch.broadcast_shapes(*shapes.values()))
    except RuntimeError:
        listing = ", ".join(f"{name} {tuple(s)}" for name, s in shapes.items())
        raise ValueError(
            f"leading (batch and head) dimensions must broadcast, got {listing}"
            + ("; for fewer key than query heads pass enable_gqa=True" if {"query", "key"} <= set(shapes) else "")
        ) from None


def grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> int:
    """How many query heads share a key head."""
    if min(query.dim(), key.dim(), value.dim()) < 3:
        raise ValueError(
            f"enable_gqa needs a head dimension (..., heads, points, features), got query {shape(query)}, "
            f"key {shape(key)} and value {shape(value)}"
        )
    heads, shared = query.shape[-3], key.shape[-3]
    if value.shape[-3] != shared:
        raise ValueError(f"key has {shared} heads and value {value.shape[-3]}; with enable_gqa they must agree")
    if shared == 0 or heads % shared:
        raise ValueError(f"query heads must be a multiple of key heads, got {heads} and {shared}")
    return heads // shared


def choice(name: str, got: object, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {got!r}")


def covariance(got: object) -> None:
    if not callable(got):
        choice("covariance", got, ("ridge", "convex", "within"))


def covariance_matrix(sigma: object, key: Tensor, look: bool) -> None:
    """What a callable covariance returned: (..., d, d), floating point, symmetric."""
    d = key.shape[-1]
    if not isinstance(sigma, Tensor) or not sigma.dtype.is_floating_point:
        got = sigma.dtype if isinstance(sigma, Tensor) else type(sigma).__name__
        raise TypeError(f"a covariance must return a floating-point tensor (..., d, d), got {got}")
    if sigma.dim() < 2 or sigma.shape[-2:] != (d, d):
        raise ValueError(f"a covariance must return (..., d, d) with d = {d} features, got {tuple(sigma.shape)}")
    leading(key=key.shape[:-2], covariance=sigma.shape[:-2])
    if not look:
        return
    with torch.no_grad():
        uneven, size = (sigma - sigma.mT).abs().amax(), sigma.abs().amax()
        if sigma.numel() and bool(uneven > 1e-4 * size):
            raise ValueError(
                f"a covariance must return a symmetric matrix, got entries that differ by {uneven.item():.1e} from "
                "their mirror images; return (sigma + sigma.mT) / 2 if that is what you mean"
            )


def semidefinite(values: Tensor, slack: Tensor) -> None:
    """Eigenvalues of what must be positive semidefinite."""
    if bool((values < -slack).any()):
        raise ValueError(
            f"a kernel or covariance must be positive semidefinite, got an eigenvalue {values.amin().item():.3g}; use "
            "another kernel, or an alpha that makes up for it"
        )


def one_hot(value: Tensor, keep: Tensor | None = None) -> None:
    """Class labels as values: one 1 per row, 0 elsewhere. Rows that `keep` (..., N) leaves out may hold anything."""
    ok = ((value == 0) | (value == 1)).all(-1) & (value.sum(-1) == 1)
    if keep is not None:
        ok = ok | ~keep
    if not bool(ok.all()):
        row = value.detach().expand(*ok.shape, value.shape[-1])[~ok][0].tolist()
        raise ValueError(
            f"covariance='within' and the classifiers need one-hot values (..., N, C), got a row {row}; use "
            "torch.nn.functional.one_hot(labels, C).to(key.dtype)"
        )


def query(query: Any, like: Tensor, mapped: bool) -> None:
    """Queries (..., M, d) for points like (..., d); `mapped`: only features of the points are known, not their d."""
    floating_tensor("query", query)
    if query.dim() < 2 or (query.shape[-1] != like.shape[-1] and not mapped):
        raise ValueError(
            f"query must have shape (..., M, d) with d = {like.shape[-1]} features, got {tuple(query.shape)}"
        )
    if query.device != like.device:
        raise ValueError(f"query is on {query.device} but the context is on {like.device}; move it with .to(device)")


def priors(priors: object, sizes: Tensor) -> Tensor:
    """Prior probabilities (..., C), >= 0 and of sum 1; classes that have no points cannot have one."""
    if not isinstance(priors, Tensor) or not priors.dtype.is_floating_point:
        raise TypeError(
            f"priors must be a floating-point tensor (..., C), got {type(priors).__name__}; use torch.tensor"
        )
    classes = sizes.shape[-1]
    if priors.dim() < 1 or priors.shape[-1] != classes:
        raise ValueError(f"priors must have shape (..., C) with C = {classes} classes, got {tuple(priors.shape)}")
    prior = priors.to(sizes.device, torch.float64)
    ok = (prior >= 0).all() & ((prior.sum(-1) - 1).abs() < 1e-5).all()
    if not torch.compiler.is_compiling():
        if not bool(ok):
            raise ValueError(f"priors must be >= 0 and sum to 1, got {priors.detach().tolist()}; use p / p.sum()")
        if bool(((prior > 0) & (sizes <= 0)).any()):
            raise ValueError("priors must be 0 for classes without points, whose means are not known; drop the class")
    return prior / prior.sum(-1, keepdim=True)


def float64(device: torch.device) -> None:
    if device.type == "mps":
        raise ValueError(
            "fitted contexts are computed in float64, which mps does not have; move the points with .cpu()"
        )


def solver(got: object, device: torch.device) -> None:
    choice("solver", got, SOLVERS)
    if got == "float64" and device.type == "mps":
        raise ValueError("solver='float64' needs a device with float64, mps has none; use solver='qr' or .cpu()")


def number(name: str, got: object, remedy: str = "") -> None:
    if type(got) is float or type(got) is int:
        return  # Real's own check takes a microsecond
    if isinstance(got, bool) or not isinstance(got, Real):
        raise TypeError(f"{name} must be a number, got {type(got).__name__}" + remedy)


def scale(got: object) -> None:
    if got is None:
        return
    if isinstance(got, Tensor) and got.numel() == 1 and not got.requires_grad:
        return
    number("scale", got, "; multiply the queries for one that is learnt or differs between heads")


def probability(p: float) -> None:
    number("dropout_p", p)
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {p}; it is the share of points left out")


def alpha_number(alpha: float, upper: float = math.inf) -> None:
    """alpha given as a number."""
    number("alpha", alpha, " (nor a torch.Tensor); use torch.as_tensor(alpha) for one per head")
    if not 0 <= alpha <= upper or alpha == math.inf:  # torch.compile(dynamic=True) has no math.isinf
        raise ValueError(alpha_message(alpha, upper))


def alpha_message(alpha: object, upper: float = math.inf) -> str:
    if upper == 1:
        return f"alpha must be in [0, 1] for covariance='convex', got {alpha}; use torch.sigmoid for a learnable one"
    return f"alpha must be finite and >= 0, got {alpha}; use alpha=0 for the minimum-norm fit"


def alpha_tensor(alpha: Tensor, device: torch.device, lead: tuple[int, ...]) -> None:
    floating_tensor("alpha", alpha)
    if alpha.dim() and alpha.device != device:
        raise ValueError(f"alpha is on {alpha.device} but query is on {device}; move it with .to(device)")
    if not _broadcasts(alpha.shape, lead):
        raise ValueError(
            f"alpha must broadcast to the leading dimensions {lead} (one per head: shape (heads,)), "
            f"got {tuple(alpha.shape)}"
        )


def weight(weight: object, device: torch.device, n: int) -> None:
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"weight must be a torch.Tensor (..., N), one number per point, got {type(weight).__name__}; use "
            f"torch.full(({n},), w) for the same w at every point, torch.as_tensor for a list of {n}"
        )
    if not weight.dtype.is_floating_point:
        raise TypeError(
            f"weight must have a floating-point dtype, got {weight.dtype}; use weight.float(), or attn_mask for bool"
        )
    if weight.device != device:
        raise ValueError(f"weight is on {weight.device} but query is on {device}; move it with .to(device)")
    if weight.dim() < 1 or weight.shape[-1] != n:
        raise ValueError(f"weight must have shape (..., N) with N = {n} points, got {tuple(weight.shape)}")


def grouped_weight(weight: Tensor, lead: tuple[int, ...], groups: int) -> None:
    """Weights beside grouped heads: one set per query head, per key head, or for all."""
    *rest, heads = lead
    own = weight.shape[-2] if weight.dim() > 1 else 1
    if own not in (1, heads, heads // groups):
        raise ValueError(
            f"weight must have one row of N per query head ({heads}), per key head ({heads // groups}) or for all (1) "
            f"at dimension -2 with enable_gqa, got shape {tuple(weight.shape)}"
        )
    leading(call=tuple(rest), weight=weight.shape[:-2])


def mask(mask: object, device: torch.device, m: int, n: int, lead: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor, got {type(mask).__name__}; use torch.as_tensor")
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(
            f"attn_mask must be bool (True = take part) or floating point (log-weights), got {mask.dtype}; "
            "use mask.bool()"
        )
    if mask.device != device:
        raise ValueError(f"attn_mask is on {mask.device} but query is on {device}; move it with .to(device)")
    if not _broadcasts(mask.shape, (*lead, m, n)):
        raise ValueError(
            f"attn_mask must broadcast to {(*lead, m, n)} = (..., M, N), got {tuple(mask.shape)}; a padding mask "
            "(batch, N) goes in as mask[:, None, :] beside (batch, points, features), or as mask[:, None, None, :] "
            "where there are heads"
        )


def require_values(weight: Tensor | None, alpha: Tensor, gain: Tensor | None) -> None:
    """Name the bad value when a check on values failed; returns when none did."""
    ok = alpha >= 0 if gain is None else (gain >= 0) & (alpha >= 0)
    if not bool(ok.all()):
        raise ValueError(alpha_message(alpha[~ok][0].item(), math.inf if gain is None else 1))
    if weight is not None and not bool((weight >= 0).all()):
        bad = weight[~(weight >= 0)][0].item()
        raise ValueError(f"weight must be >= 0, got {bad}; a weight (or exp of a float mask) of 0 leaves a point out")


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


def tensor_of_tokens(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name} must be a torch.Tensor (..., N), one number for each token, got {type(x).__name__}; use "
            f"torch.full((N,), {x if isinstance(x, Real) else name})"
        )
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name} must have a floating-point dtype, got {x.dtype}; use {name}.float()")


def per_token(name: str, x: Tensor, n: int) -> None:
    tensor_of_tokens(name, x)
    if x.dim() < 1 or x.shape[-1] != n:
        raise ValueError(f"{name} must be (..., N) with N = {n} tokens, got {tuple(x.shape)}")


def per_channel(alpha: Tensor, d: int) -> None:
    if alpha.dim() < 1 or alpha.shape[-1] != d:
        raise ValueError(f"alpha must be (..., d) with d = {d} features, got {tuple(alpha.shape)}")


def positive_channels(alpha: Tensor) -> None:
    """Looks at the host."""
    if not bool((alpha > 0).all()):
        bad = alpha[~(alpha > 0)][0].item()
        raise ValueError(f"alpha must be > 0 in every channel, got {bad}; one of 0 needs alpha_per='head'")


def decay(x: Tensor) -> None:
    """Looks at the host."""
    low, high = torch.aminmax(x.detach())
    if not bool((low >= 0) & (high <= 1)):
        raise ValueError(
            f"decay must be in [0, 1], got values from {float(low):.3g} to {float(high):.3g}; 1 forgets nothing, 0 "
            "everything before a token, and a token is left out by weight 0"
        )


def state_of(gram: Tensor, cross: Tensor, d: int, k: int) -> None:
    """A causal state is one of these tokens."""
    if gram.shape[-2:] != (d, d) or cross.shape[-2:] != (d, k):
        raise ValueError(
            f"the state is of tokens with {cross.shape[-2]} features and {cross.shape[-1]} values, and these have {d} "
            f"and {k}; start with CausalState.empty({d}, {k})"
        )


def cu_seqlens(x: Tensor, n: int) -> list[int]:
    """Where packed sequences begin, and the end of the last."""
    if not isinstance(x, Tensor):
        raise TypeError(f"cu_seqlens must be a torch.Tensor of integers, got {type(x).__name__}; use torch.tensor")
    ends: list[int] = x.tolist() if x.dim() == 1 and not x.dtype.is_floating_point else []
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != n or any(b < a for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"cu_seqlens must be integers that rise from 0 to N = {n}, one more than there are sequences, got "
            f"{ends or tuple(x.shape)}"
        )
    return ends


def mesa(
    q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], lamb: Tensor, packed: int | None, **start: Tensor | None
) -> None:
    """Shapes of a call with heads behind the tokens; `packed`: how many sequences, `start`: H and G before them."""
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"q and k must be (B, T, H, K) and v (B, T, H, V), got {shape(q)}, {shape(k)} and {shape(v)}")
    b, _, heads, d = q.shape
    for name, x in gates.items():
        if x.shape != q.shape[:3]:
            raise ValueError(f"{name} must be (B, T, H) = {tuple(q.shape[:3])}, got {shape(x)}")
    if lamb.shape != (heads, d):
        raise ValueError(f"lamb must be (H, K) = {(heads, d)}, got {shape(lamb)}; one per head goes in expanded")
    if packed is not None and b != 1:
        raise ValueError(f"with cu_seqlens all sequences are in one row, B = 1, got B = {b}")
    gram, cross = start.values()
    if (gram is None) != (cross is None):
        raise ValueError("h_kk_init and h_kv_init belong together, got only one of them")
    lead = (b if packed is None else packed, heads)
    for (name, x), wanted in zip(start.items(), ((*lead, d, d), (*lead, d, v.shape[-1])), strict=True):
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name} must be {wanted}, one state for each sequence and head, got {shape(x)}")
