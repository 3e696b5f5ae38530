"""Heads that read (query, key, value): embeddings around one of the computations of KVQ space."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention import functional as F
from intention._call import masks_and_weights as masks
from intention._covariance import Covariance, is_named
from intention.constraints import LinearConstraint
from intention.context import Context
from intention.context.fit import fit
from intention.kernels import Function, Kernel, as_kernel
from intention.nn.alpha import Alpha, HoldsAlpha, alpha_of_call, alpha_repr, hold_alpha, mean_of_points
from intention.nn.call import shared_mask, solve, unit_vectors
from intention.nn.scaling import Scale, check_scale
from intention.solve.ladder import has_float64

__all__ = ["Attention", "Intention", "LinearAttention", "NeuralProcess", "SigmaIntention"]


class Head(nn.Module):
    """What all heads share: the embeddings e_Q, e_K, e_V. One module may be passed for several of them."""

    def __init__(
        self,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed_query = _or_identity(embed_query)
        self.embed_key = _or_identity(embed_key)
        self.embed_value = _or_identity(embed_value)

    def embed(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.embed_query(query), self.embed_key(key), self.embed_value(value)


class Attention(Head):
    """softmax(e_Q(Q) e_K(K)' scale) e_V(V).

    >>> head = Attention(embed_query=nn.Linear(3, 8), embed_key=nn.Linear(3, 8))
    >>> head(torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)).shape
    torch.Size([2, 7, 5])

    Args:
        scale: multiplies the map; None is 1 / sqrt(d).
        embed_query, embed_key, embed_value: modules; None is the identity.
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
    ) -> None:
        super().__init__(embed_query, embed_key, embed_value)
        checks.scale(scale)
        self.scale = scale

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); attn_mask broadcasts to (..., M, N)."""
        return F.attention(*self.embed(query, key, value), attn_mask, is_causal=is_causal, scale=self.scale)


class LinearAttention(Head):
    """e_Q(Q) w with w = e_w(e_K(K)' e_V(V)).

    >>> head = LinearAttention()
    >>> out, w = head(torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5), return_w=True)
    >>> out.shape, w.shape
    (torch.Size([2, 7, 5]), torch.Size([2, 3, 5]))

    Args:
        scale: multiplies the map; None is 1.
        embed_query, embed_key, embed_value, embed_w: modules; None is the identity.
    """

    def __init__(
        self,
        *,
        scale: float | None = None,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
        embed_w: nn.Module | None = None,
    ) -> None:
        super().__init__(embed_query, embed_key, embed_value)
        checks.scale(scale)
        self.scale, self.embed_w = scale, embed_w

    def extra_repr(self) -> str:
        return f"scale={self.scale}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        return_w: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k), with `return_w` also w (..., d, k)."""
        query, key, value = self.embed(query, key, value)
        if self.embed_w is None and not return_w:
            return F.linear_attention(query, key, value, attn_mask, is_causal=is_causal, scale=self.scale)
        attn_mask = shared_mask(attn_mask, is_causal)
        w = F.linear_attention(unit_vectors(key), key, value, attn_mask, scale=self.scale)  # (..., d, k)
        w = w if self.embed_w is None else self.embed_w(w)
        return (query @ w, w) if return_w else query @ w


class NeuralProcess(Head):
    """e_Z([e_Q(Q); c]) with c = e_C(mean_i e_P([e_K(K_i); e_V(V_i)])): one summary of the context for all queries.

    >>> from intention.nn import mlp
    >>> head = NeuralProcess(embed_pair=mlp(3 + 5, 64, 64), embed_output=mlp(3 + 64, 64, 5))
    >>> head(torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)).shape
    torch.Size([2, 7, 5])

    Args:
        embed_pair: e_P, acts on each point (..., N, d + k) before the mean.
        embed_context: e_C, acts on the mean.
        embed_output: e_Z, acts on [query; context] (..., M, d + c).
        embed_query, embed_key, embed_value: modules; None is the identity, for all six.
    """

    def __init__(
        self,
        *,
        embed_pair: nn.Module | None = None,
        embed_context: nn.Module | None = None,
        embed_output: nn.Module | None = None,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
    ) -> None:
        super().__init__(embed_query, embed_key, embed_value)
        self.embed_pair = _or_identity(embed_pair)
        self.embed_context = _or_identity(embed_context)
        self.embed_output = _or_identity(embed_output)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, is_causal: bool = False
    ) -> Tensor:
        """query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); attn_mask broadcasts to (..., M, N)."""
        query, key, value = self.embed(query, key, value)
        counted = masks.count(attn_mask, None, is_causal, key.shape[-2], key.dtype)
        seen = counted.seen()
        pairs = self.embed_pair(torch.cat([masks.fill(key, seen), masks.fill(value, seen)], -1))  # (..., N, p)
        weight = counted.total(pairs.dtype)  # (..., N)
        weight = None if weight is None else weight.unsqueeze(-2)
        own = masks.triangle(query.shape[-2], key.shape[-2], key.device) if is_causal else counted.per_query
        if own is not None:
            taken = masks.as_weight(own, pairs.dtype)
            weight = taken if weight is None else taken * weight  # (..., M, N)
        context = self.embed_context(mean_of_points(pairs, weight))  # (..., M or 1, c)
        lead = torch.broadcast_shapes(query.shape[:-1], context.shape[:-1])
        both = [x.expand(*lead, x.shape[-1]) for x in (query, context)]
        return self.embed_output(torch.cat(both, -1))


class SigmaIntention(Head, HoldsAlpha):
    """softmax(e_Q(Q) Sigma^-1 e_K(K)' scale) e_V(V) with Sigma = K'K + alpha I of the embedded keys.

    >>> head = SigmaIntention(0.1)
    >>> head(torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)).shape
    torch.Size([2, 7, 5])

    Arguments as in `Intention`; a softmax has no w, and neither kernels nor constraints.
    """

    def __init__(
        self,
        alpha: Alpha = None,
        *,
        intercept: bool = False,
        covariance: Covariance = "ridge",
        scale: Scale = None,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
    ) -> None:
        super().__init__(embed_query, embed_key, embed_value)
        checks.covariance(covariance)
        check_scale(scale, softmax=True)
        self.intercept, self.covariance, self.scale = intercept, covariance, scale
        hold_alpha(self, alpha, covariance, scale)

    def extra_repr(self) -> str:
        return f"{alpha_repr(self)}, intercept={self.intercept}, scale={self.scale!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); attn_mask broadcasts to (..., M, N)."""
        points = self.embed(query, key, value)
        options = {"scale": self.scale, "covariance": self.covariance, "weight": weight, "intercept": self.intercept}
        return solve(F.sigma_intention, *points, attn_mask, is_causal=is_causal, alpha=self.alpha, **options)


class Intention(Head, HoldsAlpha):
    """Least squares as a layer: e_Q(Q) w with w = e_w(Sigma^-1 e_K(K)' e_V(V)), fitted on (key, value).

    >>> head = Intention(alpha=0.1, intercept=True)
    >>> query, key, value = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> head(query, key, value).shape
    torch.Size([2, 7, 5])
    >>> from intention.nn import LearnableAlpha, mlp
    >>> embed = mlp(3, 64, 64)
    >>> head = Intention(LearnableAlpha(0.1), embed_query=embed, embed_key=embed)  # one embedding for both
    >>> out, w = head(query, key, value, return_w=True)
    >>> w.shape
    torch.Size([2, 64, 5])

    Args:
        alpha: a fixed number or tensor that broadcasts to the leading dimensions, `LearnableAlpha`, `ContextAlpha`, or
            a module of your own (key, value, weight) -> alpha. None is the default of the covariance.
        intercept: add an unregularised constant feature.
        covariance: "ridge", "convex", "within" or a callable.
        kernel: a name, a `kernels.Kernel` (its parameters are registered) or a callable.
        constraints: a `LinearConstraint` or several; gradients flow through the constraints that are active.
        scale: multiplies the map. None is 1; "variance" gives its entries a variance near 1 at the start, "output" the
            output that of the values (see docs/nn.md); "attention" is alpha / sqrt(d), with which a large alpha is
            linear attention.
        embed_query, embed_key, embed_value: modules; None is the identity.
        embed_w: module that acts on w (..., d, k); with an intercept (..., d + 1, k), the last row is the prediction at
            the mean of the keys.
    """

    def __init__(
        self,
        alpha: Alpha = None,
        *,
        intercept: bool = False,
        covariance: Covariance = "ridge",
        kernel: str | Kernel | Function | None = None,
        constraints: LinearConstraint | Iterable[LinearConstraint] = (),
        scale: Scale = None,
        embed_query: nn.Module | None = None,
        embed_key: nn.Module | None = None,
        embed_value: nn.Module | None = None,
        embed_w: nn.Module | None = None,
    ) -> None:
        super().__init__(embed_query, embed_key, embed_value)
        checks.covariance(covariance)
        check_scale(scale, softmax=False)
        self.intercept, self.covariance, self.scale = intercept, covariance, scale
        hold_alpha(self, alpha, covariance, scale)
        self.kernel = None if kernel is None else as_kernel(kernel)
        several = [constraints] if isinstance(constraints, LinearConstraint) else list(constraints)
        self.constraints = nn.ModuleList(several)
        self.embed_w = embed_w
        if scale is not None and (self.fitted or (isinstance(scale, str) and intercept)):
            raise ValueError(
                f"scale={scale!r} multiplies the map Q Sigma^-1 K', which a kernel, constraints or (for a scale by "
                "name) an intercept do not have; use scale=None"
            )
        if embed_w is not None and self.fitted:
            raise ValueError("embed_w acts on w, which is given by the kernel or the constraints; use one or the other")

    def extra_repr(self) -> str:
        kernel = None if self.kernel is None else self.kernel.name
        return f"{alpha_repr(self)}, intercept={self.intercept}, kernel={kernel!r}, scale={self.scale!r}"

    @property
    def fitted(self) -> bool:
        """Whether this head needs a `Context`."""
        return self.kernel is not None or len(self.constraints) > 0

    def fit(
        self, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *, weight: Tensor | None = None
    ) -> Context:
        """The context fitted to key (..., N, d), value (..., N, k) and weight (..., N), under the constraints.

        It answers embedded queries: context(head.embed_query(query)).

        Points that a mask (..., 1, N) hides count 0 in it.
        """
        return self._fit(self.embed_key(key), self.embed_value(value), shared_mask(attn_mask, False), weight)

    def _fit(self, key: Tensor, value: Tensor, attn_mask: Tensor | None, weight: Tensor | None) -> Context:
        counted = masks.count(attn_mask, weight, False, key.shape[-2], key.dtype)
        alpha = alpha_of_call(self.alpha, self.covariance, key, value, counted, False)
        key, value = masks.fill(key, counted.keep), masks.fill(value, counted.keep)
        wide = torch.promote_types(key.dtype, torch.float32)  # weights keep their precision, as in `functional`
        mass = masks.count(attn_mask, weight, False, key.shape[-2], wide).total(wide)
        context = fit(key, value, alpha, mass, self.intercept, self.covariance, self.kernel)
        for constraint in self.constraints:
            context = constraint(context)
        return context

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *,
        weight: Tensor | None = None,
        is_causal: bool = False,
        return_w: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """(..., M, k), and with `return_w` also w (..., d, k). Masks and weights as in `functional.intention`.

        With an intercept w is (..., d + 1, k), and the last row is the prediction at 0.
        """
        query, key, value = self.embed(query, key, value)
        if self.fitted:
            context = self._fit(key, value, shared_mask(attn_mask, is_causal), weight)
            return (context(query), context.w) if return_w else context(query)
        options = {"scale": self.scale, "covariance": self.covariance, "weight": weight, "intercept": self.intercept}
        if self.embed_w is None and not return_w:
            return solve(F.intention, query, key, value, attn_mask, is_causal=is_causal, alpha=self.alpha, **options)
        attn_mask = shared_mask(attn_mask, is_causal)
        if self.intercept:
            out, w = self._with_constant(query, key, value, attn_mask, options)
        else:  # w is the prediction at the unit vectors
            dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
            wide = torch.promote_types(dtype, torch.float32)  # half precision may have no room for w
            w = solve(F.intention, unit_vectors(key).to(wide), key, value, attn_mask, alpha=self.alpha, **options)
            w = w if self.embed_w is None else self.embed_w(w.to(dtype)).to(wide)
            out, w = (query.to(wide) @ w).to(dtype), w.to(dtype)
        return (out, w) if return_w else out

    def _with_constant(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """(q - m) w + c with m the mean of the keys (far from 0, q w and c - m w cancel), and w over c - m w."""
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        if is_named(self.covariance) and has_float64(key.device):
            wide = torch.float64  # keys around their mean, rounded, have lost their narrow directions
        counted = masks.count(attn_mask, options["weight"], False, key.shape[-2], wide)
        alpha = alpha_of_call(self.alpha, self.covariance, key, value, counted, False)
        key, value = (masks.fill(x.to(wide), counted.keep) for x in (key, value))
        weight = counted.total(wide)
        share = None if weight is None else weight.unsqueeze(-2)
        mean, level = mean_of_points(key, share), mean_of_points(value, share)
        target = value if self.covariance == "within" else value - level  # what is one-hot stays so
        at = unit_vectors(key, origin=True)
        found = solve(F.intention, at, key - mean, target, attn_mask, alpha=alpha, read=value, **options)
        constant = found[..., -1:, :]
        rows = torch.cat([found[..., :-1, :] - constant, constant if target is value else constant + level], -2)
        if self.embed_w is not None:
            rows = self.embed_w(rows.to(dtype)).to(wide)
        w, constant = rows[..., :-1, :], rows[..., -1:, :]
        out = (query.to(wide) - mean) @ w + constant
        return out.to(dtype), torch.cat([w, constant - mean @ w], -2).to(dtype)


def _or_identity(module: nn.Module | None) -> nn.Module:
    return nn.Identity() if module is None else module
