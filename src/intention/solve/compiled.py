"""The compiled door: the same implementations as custom operators, for torch.compile and torch.export.

Eager code never comes here: torch.func.grad does not work through custom operators and forward-mode AD would lose
tangents.
Double backward through torch.compile is a limit of torch.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.library import custom_op

from intention.solve import inverse, sequence, transform
from intention.solve.batch import backward_batch, solve_batch
from intention.solve.doors import gather_batch, refuse_onnx, scatter_batch
from intention.solve.ladder import REFINED, Report, pack, unpack, warn_inaccurate
from intention.solve.problem import Plan, Problem
from intention.solve.pullback import Needs
from intention.solve.rows import Points, transform_rows

Opt = Optional[Tensor]  # noqa: UP045 - custom_op reads the annotations itself


def _factor_dtype(like: Tensor, solver: str) -> torch.dtype:
    return torch.float64 if solver == "float64" else like.dtype


def _plain(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)  # inductor asserts on strides


def _whole(packed: Tensor, dual: bool, dtype: torch.dtype) -> Tensor:
    """A report of the shape that does not depend on what happened."""
    return pack(unpack(packed, dual, dtype))


def _light(packed: Tensor) -> Tensor:
    """Back to ratios alone where nothing happened."""
    return packed if bool((packed[:, 0] >= REFINED).any()) else packed[:, 1]


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem, plan = Problem(query, key, value, weight, alpha, gain), Plan(dual, intercept, scale)
    out, coef, matrix, packed = solve_batch(problem, plan, solver, trusted)
    return _plain(out, coef, matrix, _whole(packed, dual, out.dtype))  # type: ignore[return-value]


def _ridge_fake(query: Any, key: Any, value: Any, weight: Any, alpha: Any, gain: Any, dual: Any, *rest: Any) -> Any:
    batch, (n, d), k = alpha.shape[0], key.shape[-2:], value.shape[-1]
    size = n if dual else d
    factor_dtype = _factor_dtype(query, rest[2])
    return (
        query.new_empty(*query.shape[:-1], k),
        query.new_empty(batch, size, k, dtype=factor_dtype),
        query.new_empty(batch, size, size, dtype=factor_dtype),
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    problem = Problem(query, key, value, weight, alpha, gain)
    plan = Plan(dual, intercept, scale)
    grads = backward_batch(grad, problem, coef, matrix, _light(packed), plan, solver, Needs(weight=weight is not None))
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in grads[:6])  # type: ignore[return-value]


def _ridge_backward_fake(
    grad: Any, query: Any, key: Any, value: Any, weight: Any, alpha: Any, gain: Any, *_: Any
) -> Any:
    return tuple(
        grad.new_empty(0) if x is None else grad.new_empty(x.shape) for x in (query, key, value, weight, alpha, gain)
    )


def _ridge_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.static = inputs[6:10]
    ctx.save_for_backward(*inputs[:6], *output[1:])


def _ridge_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    *tensors, coef, matrix, packed = ctx.saved_tensors
    grads = torch.ops.intention.ridge_backward(grad, *tensors, coef, matrix, packed, *ctx.static)
    return *(None if x is None else g for x, g in zip(tensors, grads, strict=True)), *(None,) * 5


def _transform(
    rows: Tensor,
    key: Tensor,
    weight: Opt,
    alpha: Tensor,
    gain: Opt,
    solver: str,
    inverse: bool,
    trusted: bool,
    matrix: Opt,
    packed: Opt,
) -> tuple[Tensor, Tensor, Tensor]:
    out, factor, packed = transform_rows(rows, key, weight, alpha, gain, solver, inverse, trusted, matrix, packed)
    return _plain(out, factor, _whole(packed, False, factor.dtype))  # type: ignore[return-value]


def _transform_fake(rows: Any, key: Any, weight: Any, alpha: Any, gain: Any, solver: Any, *_: Any) -> Any:
    batch, n = rows.shape[0], rows.shape[2]
    matrix = rows.new_empty(batch, n, n, dtype=_factor_dtype(rows, solver))
    return rows.new_empty(rows.shape), matrix, matrix.new_empty(batch, 3)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    points = Points(rows, key, weight, alpha, gain)
    grads = transform._pull(grad, points, out, matrix, _light(packed), solver, inverse)
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in grads)  # type: ignore[return-value]


def _transform_backward_fake(grad: Any, rows: Any, key: Any, weight: Any, alpha: Any, gain: Any, *_: Any) -> Any:
    return tuple(grad.new_empty(0) if x is None else grad.new_empty(x.shape) for x in (rows, key, weight, alpha, gain))


def _transform_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.static = inputs[5:7]
    ctx.save_for_backward(*inputs[:5], *output)


def _transform_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    *tensors, out, matrix, packed = ctx.saved_tensors
    grads = torch.ops.intention.transform_backward(grad, *tensors, out, matrix, packed, *ctx.static)
    return *(None if x is None else g for x, g in zip(tensors, grads, strict=True)), *(None,) * 5


def _watched(rows: Tensor, error: Tensor) -> Tensor:
    """The rows as they are; says so where their scores are not accurate."""
    warn_inaccurate(Report(error, error / torch.finfo(rows.dtype).eps, error))
    return rows.clone(memory_format=torch.contiguous_format)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    nine = query, key, value, weight, alpha, gain, gram, cross, log_decay
    grads = sequence.causal_pull(grad, nine, way, transposed)
    return tuple(grad.new_empty(0) if g is None else g.contiguous() for g in grads)  # type: ignore[return-value]


def _causal_backward_fake(grad: Any, *saved: Any) -> Any:
    return tuple(grad.new_empty(0) if x is None else x.new_empty(x.shape) for x in saved[:9])


def _causal_setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[2])


def _causal_grad(ctx: Any, grad: Any, *_: Any) -> Any:
    saved = ctx.saved_tensors
    grads = torch.ops.intention.causal_backward(grad, *saved, False)
    return tuple(None if x is None else g for x, g in zip(saved[:9], grads, strict=True))


def _batched(op: Any) -> Any:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        out = op(*(gather_batch(a, d, info.batch_size) for a, d in zip(args, in_dims, strict=True)))
        return tuple(scatter_batch(x, info.batch_size) for x in out), (0,) * len(out)

    return rule


def _register(name: str, implementation: Any, fake: Any) -> Any:
    def shapes(*args: Any) -> Any:
        refuse_onnx()
        return fake(*args)

    op: Any = custom_op(f"intention::{name}", implementation, mutates_args=())
    op.register_fake(shapes)
    op.register_vmap(_batched(op))
    return op


ridge_op = _register("ridge", _ridge, _ridge_fake)
ridge_op.register_autograd(_ridge_grad, setup_context=_ridge_setup)
_register("ridge_backward", _ridge_backward, _ridge_backward_fake)
transform_op = _register("transform", _transform, _transform_fake)
transform_op.register_autograd(_transform_grad, setup_context=_transform_setup)
_register("transform_backward", _transform_backward, _transform_backward_fake)
inverse_op = _register("inverse", _inverse, _inverse_fake)
inverse_op.register_autograd(_inverse_grad, setup_context=_inverse_setup)
causal_op = _register("causal", _causal, _causal_fake)
causal_op.register_autograd(_causal_grad, setup_context=_causal_setup)
watched_op = _register("watched", _watched, lambda rows, _: rows.new_empty(rows.shape))
watched_op.register_autograd(lambda ctx, grad: (grad, None))
watched_op.register_vmap(_watched_batched)
_register("causal_backward", _causal_backward, _causal_backward_fake)
