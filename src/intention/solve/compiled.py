"""The compiled door: the same implementations as custom operators, for torch.compile and torch.export.

A forward keeps what a backward needs only where a gradient can be asked for (`keep`); a backward without it solves
again. A backward is told which gradients are asked for (`needs`) and returns those, in the order of the arguments.

Eager code never comes here: torch.func.grad does not work through custom operators and forward-mode AD would lose
tangents.
Double backward through torch.compile is a limit of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.library import Library, register_autograd, register_fake, register_vmap

from intention.solve.causal import sequence
from intention.solve.doors import gather_batch, refuse_onnx, scatter_batch
from intention.solve.ladder import REFINED, Report, warn_inaccurate, whole
from intention.solve.matrix import inverse
from intention.solve.problem import Needs, Plan, Problem
from intention.solve.ridge.by_route import backward_batch, solve_batch
from intention.solve.transform import fused, transform
from intention.solve.transform.rows import Points, transform_rows

Opt = Optional[Tensor]  # noqa: UP045 - a key below, where Tensor | None is not the same before Python 3.14
_IN_SCHEMAS = {
    Tensor: "Tensor",
    Opt: "Tensor?",
    bool: "bool",
    int: "SymInt",
    float: "float",
    str: "str",
    Sequence[bool]: "bool[]",
    list[Tensor]: "Tensor[]",
}


def _factor_dtype(like: Tensor, solver: str) -> torch.dtype:
    return torch.float64 if solver == "float64" else like.dtype


def _plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)  # inductor asserts on strides


def _light(packed: Tensor) -> Tensor:
    """Back to ratios alone where nothing happened."""
    return packed[:, 1] if packed[:, 0].amax().item() < REFINED else packed


def _needed(ctx: Any, tensors: Sequence[Opt]) -> list[bool]:
    return [need and x is not None for need, x in zip(ctx.needs_input_grad, tensors, strict=False)]


def _some(grads: Sequence[Opt], needs: Sequence[bool]) -> list[Tensor]:
    return [g.contiguous() for g, need in zip(grads, needs, strict=True) if need and g is not None]


def _spread(ctx: Any, grads: Sequence[Tensor], needs: Sequence[bool]) -> tuple[Opt, ...]:
    """The gradients that were asked for in their places, None for every other argument."""
    found = iter(grads)
    given = [next(found) if need else None for need in needs]
    return *given, *(None,) * (len(ctx.needs_input_grad) - len(given))


def _like(tensors: Sequence[Opt], needs: Sequence[bool]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x, need in zip(tensors, needs, strict=True) if need and x is not None]


def _ridge(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    dual: bool,
    intercept: bool,
    scale: float,
    solver: str,
    trusted: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, plan = Problem(query, key, value, weight, alpha, gain), Plan(dual, intercept, scale)
    out, coef, matrix, packed = solve_batch(problem, plan, solver, trusted, keep, False)
    if not keep:
        coef, matrix = out.new_empty(0), out.new_empty(0)
    return _plain(out, coef, matrix, whole(packed, dual, out.dtype))  # type: ignore[return-value]


def _ridge_fake(query: Any, key: Any, value: Any, weight: Any, alpha: Any, gain: Any, dual: Any, *rest: Any) -> Any:
    batch, (n, d), k = alpha.shape[0], key.shape[-2:], value.shape[-1]
    size, (_, _, solver, _, keep) = n if dual else d, rest
    dtype = _factor_dtype(query, solver) if keep else query.dtype
    return (
        query.new_empty(*query.shape[:-1], k),
        query.new_empty((batch, size, k) if keep else 0, dtype=dtype),
        query.new_empty((batch, size, size) if keep else 0, dtype=dtype),
        query.new_empty(batch, 3),
    )


def _ridge_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    coef: Tensor,
    matrix: Tensor,
    packed: Tensor,
    dual: bool,
    intercept: bool,
    scale: float,
    solver: str,
    needs: Sequence[bool],
) -> list[Tensor]:
    problem, plan = Problem(query, key, value, weight, alpha, gain), Plan(dual, intercept, scale)
    if coef.numel():
        packed = _light(packed)
    else:
        _, coef, matrix, packed = solve_batch(problem, plan, solver, True)
    return _some(backward_batch(grad, problem, coef, matrix, packed, plan, solver, Needs(*needs))[:6], needs)


def _ridge_backward_fake(grad: Any, *rest: Any) -> Any:
    return _like(rest[:6], rest[-1])


def _ridge_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.static = inputs[6:10]
    ctx.save_for_backward(*inputs[:6], *output[1:])


def _ridge_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    saved = ctx.saved_tensors
    needs = _needed(ctx, saved[:6])
    return _spread(ctx, torch.ops.intention.ridge_backward(grad, *saved, *ctx.static, needs), needs)


def _transform(
    rows: Tensor,
    key: Tensor,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    solver: str,
    inverse: bool,
    trusted: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    args = rows, key, weight, alpha, gain, solver, inverse, trusted, None, None, keep
    out, matrix, packed = transform_rows(*args)
    packed = whole(packed, False, matrix.dtype)
    return _plain(out, matrix if keep else out.new_empty(0), packed)  # type: ignore[return-value]


def _transform_fake(rows: Any, key: Any, weight: Any, alpha: Any, gain: Any, solver: Any, *rest: Any) -> Any:
    batch, n, dtype = rows.shape[0], rows.shape[2], _factor_dtype(rows, solver)
    keep = rest[-1]
    matrix = rows.new_empty((batch, n, n) if keep else 0, dtype=dtype if keep else rows.dtype)
    return rows.new_empty(rows.shape), matrix, rows.new_empty(batch, 3, dtype=dtype)


def _transform_backward(
    grad: Tensor,
    rows: Tensor,
    key: Tensor,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    out: Tensor,
    matrix: Tensor,
    packed: Tensor,
    solver: str,
    inverse: bool,
    needs: Sequence[bool],
) -> list[Tensor]:
    points = Points(rows, key, weight, alpha, gain)
    if matrix.numel():
        packed = _light(packed)
    else:
        _, matrix, packed = transform_rows(*points, solver, inverse, True, None, None)
    return _some(transform._pull(grad, points, out, matrix, packed, solver, inverse), needs)


def _transform_backward_fake(grad: Any, *rest: Any) -> Any:
    return _like(rest[:5], rest[-1])


def _transform_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.static = inputs[5:7]
    ctx.save_for_backward(*inputs[:5], *output)


def _transform_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    saved = ctx.saved_tensors
    needs = _needed(ctx, saved[:5])
    return _spread(ctx, torch.ops.intention.transform_backward(grad, *saved, *ctx.static, needs), needs)


def _watched(rows: Tensor, error: Tensor) -> Tensor:
    """The rows as they are; says so where their scores are not accurate."""
    warn_inaccurate(Report(error, error / torch.finfo(rows.dtype).eps, error))
    return rows.clone(memory_format=torch.contiguous_format)


def _watched_fake(rows: Any, _: Any) -> Any:
    return rows.new_empty(rows.shape)


def _watched_grad(ctx: Any, grad: Any) -> Any:
    return grad, None


def _watched_batched(info: Any, in_dims: Any, rows: Any, error: Any) -> Any:
    return torch.ops.intention.watched(rows, error), in_dims[0]


def _inverse(
    matrix: Tensor, weight: Opt, alpha: Tensor, gain: Opt, quiet: bool, rounding: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _plain(*inverse.inverse_batch(matrix, weight, alpha, gain, quiet, rounding))  # type: ignore[return-value]


def _inverse_fake(matrix: Any, *_: Any) -> Any:
    batch = matrix.shape[0]
    return matrix.new_empty(matrix.shape), matrix.new_empty(batch), matrix.new_empty(batch, 3)


def _inverse_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], output[0], output[2])


def _inverse_grad(ctx: Any, grad: Any, grad_logdet: Any, _: Any) -> Any:
    return *inverse.pull(grad, grad_logdet, *ctx.saved_tensors), None, None


def _causal(
    query: Tensor,
    key: Tensor,
    value: Opt,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    gram: Opt,
    cross: Opt,
    log_decay: Opt,
) -> tuple[Tensor, Tensor, Tensor]:
    return sequence.causal_batch(query, key, value, weight, alpha, gain, gram, cross, log_decay)


def _causal_fake(query: Any, key: Any, value: Any, weight: Any, alpha: Any, *_: Any) -> Any:
    batch, n = key.shape[:2]
    width = key.shape[2] if value is None else value.shape[2]
    return key.new_empty(batch, n, width), key.new_empty(batch, 3), key.new_empty(batch, dtype=torch.int8)


def _causal_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Opt,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    gram: Opt,
    cross: Opt,
    log_decay: Opt,
    way: Tensor,
    transposed: bool,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Nine, empty where not asked for: is_grads_batched takes no list."""
    nine = query, key, value, weight, alpha, gain, gram, cross, log_decay
    found = iter(_some(sequence.causal_pull(grad, nine, way, transposed, any(needs[3:6])), needs))
    return tuple(next(found) if need else grad.new_empty(0) for need in needs)  # type: ignore[return-value]


def _causal_backward_fake(grad: Any, *rest: Any) -> Any:
    found = iter(_like(rest[:9], rest[-1]))
    return tuple(next(found) if need else grad.new_empty(0) for need in rest[-1])


def _causal_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[2])


def _causal_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    saved = ctx.saved_tensors
    needs = _needed(ctx, saved[:9])
    found = torch.ops.intention.causal_backward(grad, *saved, False, needs)
    return tuple(x if need else None for x, need in zip(found, needs, strict=True))


def _sigma(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, gain: Opt, trusted: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _plain(*fused.answer(Problem(query, key, value, None, alpha, gain), trusted, keep))  # type: ignore[return-value]


def _sigma_fake(query: Any, key: Any, value: Any, alpha: Any, gain: Any, trusted: Any, keep: Any) -> Any:
    (batch, m), k, n = query.shape[:2], value.shape[2], min(key.shape[1:])
    return (
        query.new_empty(batch, m, k),
        query.new_empty((batch, 2, m) if keep else 0),
        query.new_empty((batch, n, n) if keep else 0),
        query.new_empty(batch, 3),
    )


def _sigma_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    alpha: Tensor,
    gain: Opt,
    out: Tensor,
    kept: Tensor,
    matrix: Tensor,
    packed: Tensor,
    needs: Sequence[bool],
) -> list[Tensor]:
    problem = Problem(query, key, value, None, alpha, gain)
    d_query, d_key, d_value, d_alpha, d_gain = needs
    asked = Needs(d_query, d_key, d_value, False, d_alpha, d_gain)
    grads = fused.pull(grad, problem, out, kept, matrix, packed, asked)
    return _some([*grads[:3], *grads[4:]], needs)


def _sigma_backward_fake(grad: Any, *rest: Any) -> Any:
    return _like(rest[:5], rest[-1])


def _sigma_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5], *output)


def _sigma_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    saved = ctx.saved_tensors
    needs = _needed(ctx, saved[:5])
    return _spread(ctx, torch.ops.intention.sigma_backward(grad, *saved, needs), needs)


def _batched(op: Any) -> Any:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        out = op(*(gather_batch(a, d, info.batch_size) for a, d in zip(args, in_dims, strict=True)))
        return type(out)(scatter_batch(x, info.batch_size) for x in out), type(out)(0 for _ in out)

    return rule


_library = Library("intention", "DEF")


def _schema(implementation: Callable[..., Any]) -> str:
    """Not by torch.library.infer_schema: older ones know neither the names of this file nor collections.abc."""
    kinds = get_type_hints(implementation)
    returned = kinds.pop("return")
    several = get_origin(returned) is tuple
    made = ", ".join(_IN_SCHEMAS[kind] for kind in (get_args(returned) if several else (returned,)))
    given = ", ".join(f"{_IN_SCHEMAS[kind]} {name}" for name, kind in kinds.items())
    return f"({given}) -> {f'({made})' if several else made}"


def _register(
    name: str, implementation: Any, fake: Any, setup: Any = None, backward: Any = None, batched: Any = None
) -> None:
    """Not by `custom_op`: its wrapper takes twice the time of a small call, and no gradient can be taken inside it."""

    def shapes(*args: Any) -> Any:
        refuse_onnx()
        return fake(*args)

    full = f"intention::{name}"
    _library.define(name + _schema(implementation))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(full, shapes, lib=_library)
    register_vmap(full, batched or _batched(getattr(torch.ops.intention, name)), lib=_library)
    if backward is not None:
        register_autograd(full, backward, setup_context=setup, lib=_library)


_register("ridge", _ridge, _ridge_fake, _ridge_setup, _ridge_grad)
_register("ridge_backward", _ridge_backward, _ridge_backward_fake)
_register("transform", _transform, _transform_fake, _transform_setup, _transform_grad)
_register("transform_backward", _transform_backward, _transform_backward_fake)
_register("inverse", _inverse, _inverse_fake, _inverse_setup, _inverse_grad)
_register("causal", _causal, _causal_fake, _causal_setup, _causal_grad)
_register("watched", _watched, _watched_fake, None, _watched_grad, _watched_batched)
_register("causal_backward", _causal_backward, _causal_backward_fake)
_register("sigma", _sigma, _sigma_fake, _sigma_setup, _sigma_grad)
_register("sigma_backward", _sigma_backward, _sigma_backward_fake)
