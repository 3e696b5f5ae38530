"""One declaration per operator, and the two doors that are made of it.

An operator says once what it computes, what its outputs look like, and its derivatives: the first ones, and those of
any order, of which tangents are made as well. Eager calls go through an autograd.Function. Calls that torch.compile or
torch.export trace go through custom operators, `intention::name` and `intention::name_backward`, with the same
implementation inside. Eager code never takes that door: torch.func.grad does not work through custom operators, and
forward-mode AD would lose tangents. Double backward through torch.compile is a limit of torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import Library, register_autograd, register_fake, register_vmap

from intention.solve import torch_state
from intention.solve.torch_state import (
    Ctx,
    asked,
    compiling,
    eager,
    forward_mode,
    gradient_free,
    transformed,
    unobserved,
)

Opt = Tensor | None
Outputs = tuple[Tensor, ...]
Grads = Sequence[Opt]
Call = Callable[..., object]
Dims = tuple[int | None, ...]

Options = tuple[Any, ...]  # of the types that the operator's schema says

_utils = getattr(getattr(torch, "_functorch", None), "utils", None)
_unwrap_dead_wrappers: Callable[[Options], Options] | None = getattr(_utils, "unwrap_dead_wrappers", None)
_library = Library("intention", "DEF")


P = ParamSpec("P")
R = TypeVar("R")
MaybeTensor = TypeVar("MaybeTensor", Tensor, Tensor | None)
_any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def no_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Run with autocast off: a Gram accumulated in half precision is wrong by a factor, scores by more than an output's
    rounding. Operators do so anyway."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _any_autocast():
            return function(*args, **kwargs)
        first: Any = args[0] if args else kwargs.get("query")
        if isinstance(first, (list, tuple)):  # gradients, of which some may be None
            first = next((x for x in first if x is not None), None)
        with torch.autocast(first.device.type if isinstance(first, Tensor) else "cpu", enabled=False):
            return function(*args, **kwargs)

    return wrapped


class Saved(NamedTuple):
    """What a backward finds."""

    tensors: tuple[Any, ...]  # those with "?" in the declaration may be None
    options: Options
    outputs: Outputs  # answers (where they are saved), what was kept, the packed report
    # what the forward saw on the host: whether the plain factor served every element; None: nobody has looked
    seen: Any


class Kept(Ctx, Protocol):
    """With what a forward keeps beside tensors."""

    options: Options
    seen: object


class Note:
    """What a forward tells its wrapper beside tensors; torch.func hands it through as it is."""

    def __init__(self, found: Outputs | None = None, seen: object = None, *, aside: bool = False) -> None:
        self.found, self.seen = found, seen  # outputs that are there already, and what was seen on the host
        self.aside = aside  # whether only answers become outputs
        self.rest: Outputs = ()


@dataclass(frozen=True, eq=False)
class Operator:
    """The declaration. Tensors and outputs are flat batches: the first dimension is that of the elements.

    `solve(*tensors, *options, keep)` gives the outputs, answers first and the packed report last, and what it saw on
    the host, where derivatives and transforms cannot look: whether the plain factor served every element. What lies
    between is kept for a backward, and may be anything without `keep`.
    """

    name: str
    tensors: str  # "query key weight?"; "?" may be None
    options: str  # "bool dual, float scale"
    answers: int
    outputs: int
    solve: Callable[..., tuple[Outputs, object]]
    shapes: Callable[..., Outputs]  # of solve, with keep=True
    pull: Callable[[Sequence[Tensor], Saved, Sequence[bool]], Grads]  # (gradients of answers, saved, needs): unwatched
    differentiable: Callable[[Sequence[Tensor], Saved, Sequence[bool]], Grads]  # the same, of any order
    saves_answers: bool = True
    whole: bool = False  # what is kept is one buffer of the whole batch, the last output: there is no report
    traced: Callable[..., tuple[Outputs, object]] | None = None  # in place of `solve`, where a graph has no second call

    count: int = field(init=False)  # of the tensors
    function: type[Door] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", len(self.tensors.split()))
        for name in ("solve", "traced", "pull", "differentiable"):
            if (function := getattr(self, name)) is not None:
                object.__setattr__(self, name, no_autocast(function))
        object.__setattr__(self, "function", _function(self))
        _register(self)

    def __call__(self, *args: Any) -> Outputs:
        """(*tensors, *options) -> (*answers, packed report)"""
        tensors = args[: self.count]
        if compiling():
            outputs = getattr(torch.ops.intention, self.name)(*args, asked(*tensors))
        elif gradient_free(*tensors):
            outputs, _ = self.solve(*args, False)
        else:
            return self.recorded(args, Note(aside=eager() and not forward_mode()))
        return *outputs[: self.answers], outputs[-1]

    def recorded(self, args: Options, note: Note) -> Outputs:
        """The same through the autograd.Function."""
        outputs = self.function.apply(*args, note)
        if not note.aside:
            return *outputs[: self.answers], outputs[-1]
        return *((outputs,) if self.answers == 1 else outputs), note.rest[-1]

    def kept(self, outputs: Outputs) -> Outputs:
        return outputs if self.saves_answers else outputs[self.answers :]


class Door(torch.autograd.Function):
    """torch binds the arguments of `apply` by inspection, 10 to 30 us a call. Ours are positional and complete."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if transformed() or _unwrap_dead_wrappers is None:
            _refuse_nested_forward(*args)
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*_unwrap_dead_wrappers(args))  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_nested_forward(*args: object) -> None:
    """torch runs the `jvp` of a Function on values without the tangents of an outer forward mode: silent zeros."""
    stack = torch_state.functorch.get_interpreter_stack() or []
    forward = {x.level() for x in stack if x.key() == torch_state.functorch.TransformType.Jvp}
    if len(forward) < 2:
        return
    levels = set()
    for x in args:
        while isinstance(x, Tensor) and torch_state.functorch.is_functorch_wrapped_tensor(x):
            levels.add(torch_state.functorch.maybe_get_level(x))
            x = torch_state.functorch.get_unwrapped(x)
    if len(levels & forward) > 1:
        raise RuntimeError(
            "forward mode within forward mode (torch.func.jacfwd or jvp, twice) loses derivatives in torch wherever "
            "there is an autograd.Function; use torch.func.hessian, or jacrev for one of the two"
        )


def _function(op: Operator) -> type[Door]:
    """The eager door."""

    class Function(Door):
        @staticmethod
        def forward(*args: Any) -> Tensor | Outputs:
            """(*tensors, *options, note). Every output takes time: where nothing transforms, only answers are."""
            note: Note = args[-1]
            outputs = note.found
            if outputs is None:
                outputs, note.seen = op.solve(*args[:-1], True)
            if not note.aside:
                return outputs
            note.rest = outputs[op.answers :]
            return outputs[0] if op.answers == 1 else outputs[: op.answers]

        @staticmethod
        def setup_context(ctx: Kept, inputs: Options, output: Any) -> None:
            note: Note = inputs[-1]
            ctx.options, ctx.seen = inputs[op.count : -1], note.seen
            ctx.set_materialize_grads(False)
            if note.aside:
                output = *((output,) if op.answers == 1 else output), *note.rest
            else:
                ctx.mark_non_differentiable(*output[op.answers :])
            saved = *inputs[: op.count], *op.kept(output)
            ctx.save_for_backward(*saved)
            if not note.aside:
                ctx.save_for_forward(*saved)

        @staticmethod
        def backward(ctx: Kept, *grads: Opt) -> tuple[Opt, ...]:
            others = (None,) * (len(ctx.options) + 1)
            grads = grads[: op.answers]
            if all(g is None for g in grads):
                return *(None,) * op.count, *others
            saved = ctx.saved_tensors  # one look: torch.utils.checkpoint makes them anew for it
            tensors, outputs = saved[: op.count], saved[op.count :]
            # of several answers, which are then saved, one may have no gradient
            came = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, outputs, strict=False)]
            needs = _needed(ctx, tensors)
            if any(map(torch_state.legacy_batched, came)):
                return *_backward_operator(op, came, tensors, outputs, ctx.options, needs), *others
            pull = op.pull if unobserved() else op.differentiable
            return *pull(came, Saved(tensors, ctx.options, outputs, ctx.seen), needs), *others

        @staticmethod
        def jvp(ctx: Kept, *tangents: Opt) -> tuple[Opt, ...]:
            saved = ctx.saved_tensors
            tensors, outputs = saved[: op.count], saved[op.count :]
            at = [torch.zeros_like(x) for x in op.shapes(*tensors, *ctx.options)[: op.answers]]
            # without tangents of their own: inside `torch.func.vjp` torch would take those along once more
            tensors = tuple(None if x is None else forward_ad.unpack_dual(x).primal for x in tensors)
            outputs = tuple(forward_ad.unpack_dual(x).primal for x in outputs)
            needs = [t is not None for t in tangents[: op.count]]

            def pulled(*grads: Tensor) -> Outputs:
                found = op.differentiable(grads, Saved(tensors, ctx.options, outputs, ctx.seen), needs)
                return tuple(x for x, need in zip(found, needs, strict=True) if need and x is not None)

            # J t is the gradient of <J'u, t> with respect to u
            pull: Any = torch.func.vjp(pulled, *at)[1]
            found = pull(tuple(t for t in tangents[: op.count] if t is not None))
            return *found, *(None,) * (op.outputs - op.answers)

        @staticmethod
        def vmap(info: Any, in_dims: Dims, *args: object) -> tuple[Outputs, Dims]:
            size = info.batch_size
            out = Function.apply(*(gather_batch(a, d, size) for a, d in zip(args, in_dims, strict=True)))
            return tuple(scatter_batch(x, size) for x in out), (0,) * op.outputs

    Function.__name__ = op.name.capitalize()
    return Function


def _needed(ctx: Ctx, tensors: Sequence[Opt]) -> list[bool]:
    return [need and x is not None for need, x in zip(ctx.needs_input_grad, tensors, strict=False)]


def _backward_operator(
    op: Operator, grads: Grads, tensors: Sequence[Opt], kept: Outputs, options: Options, needs: list[bool]
) -> tuple[Opt, ...]:
    found = overload(f"{op.name}_backward")(*grads, *tensors, *kept, *options, needs)
    return tuple(x if need else None for x, need in zip(found, needs, strict=True))


def _register(op: Operator) -> None:
    """The compiled door. Not by `custom_op`: its wrapper takes twice the time of a small call, and no gradient can be
    taken inside it. A forward keeps what a backward needs only where a gradient can be asked for (`keep`); a backward
    without it solves again. A backward is told which gradients are asked for, and gives empty tensors for the others.

    Where gradients are recorded, what a compiled program holds is `name_solved`, of which torch knows no derivative:
    at every call of an operator that has one, torch looks for it in Python, a third of the time of a small call.
    """
    solve, between = op.traced or op.solve, slice(op.answers, op.outputs - (not op.whole))

    def shown(outputs: Outputs, keep: bool) -> Outputs:
        kept = outputs[between] if keep else [outputs[0].new_empty(0) for _ in outputs[between]]
        return *outputs[: op.answers], *kept, *outputs[between.stop :]

    def forward(*args: Any) -> Outputs:
        outputs, _ = solve(*args)
        return tuple(x.contiguous() for x in shown(outputs, args[-1]))  # inductor asserts on strides

    def fake(*args: Any) -> Outputs:
        torch_state.refuse_onnx()
        return shown(op.shapes(*args[:-1]), args[-1])

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Kept, *args: Any) -> Outputs:
            with torch._C._AutoDispatchBelowAutograd():
                output = overload(f"{op.name}_solved")(*args)
            ctx.options = args[op.count : -1]
            ctx.save_for_backward(*args[: op.count], *op.kept(output))
            ctx.mark_non_differentiable(*output[op.answers :])
            return output

        @staticmethod
        def backward(ctx: Kept, *grads: Opt) -> tuple[Opt, ...]:
            saved = ctx.saved_tensors
            tensors, kept = saved[: op.count], saved[op.count :]
            needs = _needed(ctx, tensors)
            found = _backward_operator(op, grads[: op.answers], tensors, kept, ctx.options, needs)
            return *found, *(None,) * (len(ctx.options) + 1)

    def recorded(*args: Any) -> Outputs:
        if asked(*args[: op.count]):
            return Recorded.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(op.name)(*args)

    def backward(*args: Any) -> Outputs:
        grads, tensors, needs = args[: op.answers], args[op.answers : op.answers + op.count], args[-1]
        kept, options = args[op.answers + op.count : ends], args[ends:-1]
        seen = None
        if op.outputs - op.answers > (not op.whole) and not kept[-1 if op.whole else -2].numel():
            outputs, seen = solve(*tensors, *options, True)
            kept = op.kept(outputs)
        found = op.pull(grads, Saved(tensors, options, kept, seen), needs)
        pairs = zip(found, needs, strict=True)
        return tuple(x.contiguous() if need and x is not None else grads[0].new_empty(0) for x, need in pairs)

    def backward_fake(*args: Any) -> Outputs:
        torch_state.refuse_onnx()
        pairs = zip(args[op.answers : op.answers + op.count], args[-1], strict=True)
        return tuple(x.new_empty(x.shape) if need else args[0].new_empty(0) for x, need in pairs)

    saved = op.outputs if op.saves_answers else op.outputs - op.answers
    ends = op.answers + op.count + saved
    tensors = ", ".join(f"Tensor? {x[:-1]}" if x.endswith("?") else f"Tensor {x}" for x in op.tensors.split())
    options = f", {op.options}" if op.options else ""
    given = ", ".join(
        [*(f"Tensor grad{i}" for i in range(op.answers)), tensors, *(f"Tensor kept{i}" for i in range(saved))]
    )
    answer, slopes = (f"({', '.join(['Tensor'] * size)})" for size in (op.outputs, op.count))
    schema, pulled = f"({tensors}{options}, bool keep) -> {answer}", f"({given}{options}, bool[] needs) -> {slopes}"
    define(op.name, schema, forward, fake)
    define(f"{op.name}_solved", schema, forward, fake)
    define(f"{op.name}_backward", pulled, backward, backward_fake, forgotten=ends - 1 if op.whole else None)
    _library.impl(op.name, recorded, "Autograd")


def define(
    name: str,
    schema: str,
    implementation: Call,
    fake: Call,
    batched: Call | None = None,
    grad: Call | None = None,
    forgotten: int | None = None,
) -> None:
    """A custom operator by itself, without an eager door. `forgotten`: an argument that torch.vmap cannot take."""
    _library.define(name + schema)
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    register_fake(f"intention::{name}", fake, lib=_library)
    register_vmap(
        f"intention::{name}", batched or _batched(getattr(torch.ops.intention, name), forgotten), lib=_library
    )
    if grad is not None:
        register_autograd(f"intention::{name}", grad, lib=_library)


@functools.cache
def overload(name: str) -> Callable[..., Any]:
    """The one that there is: torch would look for it at every call, some microseconds."""
    return getattr(torch.ops.intention, name).default


def _batched(call: Callable[..., Outputs], forgotten: int | None) -> Call:
    def rule(info: Any, in_dims: Dims, *args: Any) -> tuple[Outputs, Dims]:
        given = [gather_batch(a, d, info.batch_size) for a, d in zip(args, in_dims, strict=True)]
        if forgotten is not None:
            given[forgotten] = args[0].new_empty(0)
        out = call(*given)
        return tuple(scatter_batch(x, info.batch_size) if x.numel() else x for x in out), tuple(
            0 if x.numel() else None for x in out
        )

    return rule


def flat(x: MaybeTensor, lead: tuple[int, ...], *own: int) -> MaybeTensor:
    """(B, *own) of a tensor whose leading dimensions broadcast to `lead`."""
    return x if x is None else x.expand((*lead, *own)).reshape(math.prod(lead), *own)


def gather_batch(x: object, dim: int | None, size: int) -> object:
    """Fold vmap's dimension into the flat batch: (B, ...) with the new one at `dim` -> (size * B, ...)."""
    if not isinstance(x, Tensor):
        return x
    x = x.unsqueeze(0).expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.reshape(-1, *x.shape[2:])


def scatter_batch(x: Tensor, size: int) -> Tensor:
    """The inverse of gather_batch, with vmap's dimension first."""
    return x.reshape(size, -1, *x.shape[1:])
