"""Run cases, compare, and report."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

import intention
from fuzz import oracle
from fuzz.draw import Case, Draw, Tensors, laid_out

FAMILIES = {"functional": 8, "causal": 4, "context": 4, "discriminant": 1, "heads": 2, "mixers": 2}  # shares of a round
WRONG, CLOSE, UNDECIDED = 1e-3, 1e-5, 1e-5
LOOSE = 0.02  # a case with more allowance than this only shows that a call runs: it is in no share


class Outcome(NamedTuple):
    errors: dict[str, float]  # by output, or "grad" and leaf
    said: bool  # an AccuracyWarning, or an error
    raised: str
    undecided: bool


def make_case(family: str, seed: int, grad: bool) -> Case:
    case = importlib.import_module(f"fuzz.{family}").make(seed, grad)
    mode = f"{' grad' if grad else ''} {case.dtype}{' autocast' if case.autocast else ''}"
    case.label = f"{family} seed={seed}{mode} | {case.label}"
    for name, x in case.tensors.items():  # numbers of the dtype of the call
        kind = case.kind(name)
        case.tensors[name] = x.bool() if kind == torch.bool else x.to(kind).double()
    draw = Draw(seed + 10**9)
    if draw.chance(0.5):  # which gradients are wanted decides what is computed
        case.leaves = tuple(x for x in case.leaves if draw.chance(0.4)) or case.leaves
    return case


def gap(got: Tensor, want: Tensor, size: Tensor | None = None, allowance: float = 0.0) -> float:
    """The worst relative error over matrices, beyond the rounding of the dtype that came; `size`: their scale."""
    if got.shape != want.shape:
        return torch.inf
    if not want.numel():
        return 0.0
    info = torch.finfo(got.dtype)
    rounding = info.eps / 2 * 1.02 * want.abs() + info.smallest_normal * info.eps
    beyond = ((got.double() - want).abs() - (rounding if info.bits == 16 else 0.0)).clamp_min(0.0)
    norm, of = (_norms(beyond), torch.maximum(_norms(want), _norms(want if size is None else size)))
    worst = norm / of.clamp_min(1e-6 * float(of.max()) + 1e-30)
    return max(worst.nan_to_num(torch.inf).max().item() - allowance, 0.0)


def _norms(x: Tensor) -> Tensor:
    """Of every matrix (..., M, k), or of what has fewer dimensions."""
    return x.square().sum(tuple(range(max(x.dim() - 2, 0), x.dim()))).sqrt() if x.dim() else x.abs()


def upstream(outs: Tensors, seed: int) -> Tensors:
    draw = Draw(seed)
    return {name: draw.normal(*x.shape).to(torch.bfloat16).double() for name, x in outs.items()}


def with_gradients(case: Case, tensors: Tensors, ours: bool, grads: Tensors | None) -> tuple[Tensors, Tensors]:
    """Outputs, and the gradients of their inner product with `grads`."""
    function = case.call if ours else case.oracle
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=ours and case.autocast)
    if grads is None:
        with torch.no_grad(), autocast:
            return function(tensors), {}
    leaves = [tensors[name].requires_grad_() for name in case.leaves]
    with autocast:
        outs = function(tensors)
    loss = sum((x * grads[name].to(x.dtype)).sum() for name, x in outs.items() if x.requires_grad)
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if isinstance(loss, Tensor) else [None] * len(leaves)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return {name: x.detach() for name, x in outs.items()}, dict(zip(case.leaves, zeros, strict=True))


class Truth(NamedTuple):
    """Outputs and gradients, the sizes that errors are measured by, and the upstream gradients."""

    outs: Tensors
    slopes: Tensors
    out_sizes: Tensors
    slope_sizes: Tensors
    grads: Tensors | None


def truth(case: Case, seed: int, grad: bool) -> Truth | None:
    """What should come, by two roundings of the same formula; None where they disagree."""
    try:
        grads = upstream(with_gradients(case, dict(case.tensors), False, None)[0], seed) if grad else None
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        # as of values: nothing is left of a class, which the call refuses
        return None
    found = []
    for rounding in (nullcontext(), oracle.mirrored(), oracle.uncancelled()):
        tensors = {name: x.clone() for name, x in case.tensors.items()}
        try:
            with rounding:
                found.append(with_gradients(case, tensors, False, grads))
        except (oracle.UndecidedError, torch.linalg.LinAlgError):  # pyright: ignore[reportPrivateImportUsage]
            return None
    (outs, slopes), again, (sizes, slope_sizes) = found
    # a point of weight 0 whose score is far above all others has a slope that no dtype holds
    slopes = {name: x for name, x in slopes.items() if not bool((x.abs() > 1e25).any())}
    right = Truth(outs, slopes, sizes, slope_sizes, grads)
    if any(not error <= UNDECIDED for error in compare(case, right, *again, 0.0).values()):
        return None
    big = max((float(x.abs().max()) for x in (*outs.values(), *slopes.values()) if x.numel()), default=0.0)
    return None if case.dtype == torch.float16 and big > 3e4 else right


def compare(case: Case, right: Truth, outs: Tensors, slopes: Tensors, allowance: float) -> dict[str, float]:
    """Errors of outputs, and of gradients as a whole: one matrix of a tensor may have a tiny one beside another's."""
    errors = {name: gap(outs[name], x, right.out_sizes[name], allowance) for name, x in right.outs.items()}
    if right.grads is None:
        return errors
    # what a gradient is at least if nothing cancels: g out / x, of which float32 has seven digits, and half precision
    # two or three: a bias whose slope is a thousandth of its terms has the rounding of these
    digits = max(1e-4, torch.finfo(case.dtype).eps)
    least = sum(float(_norms(g).norm() * _norms(right.outs[name]).norm()) for name, g in right.grads.items())
    for name, want in right.slopes.items():
        x = torch.where(case.tensors[name].isfinite(), case.tensors[name], 0.0)
        floor = digits * least / float(x.norm().clamp_min(1e-30))
        if name == "alpha":  # may be next to nothing, and so may what it does
            floor = 1e-5 * least
        size = torch.full((), max(float(right.slope_sizes[name].norm()), floor), dtype=torch.float64)
        errors[f"grad {name}"] = gap(slopes[name].reshape(1, -1), want.reshape(1, -1), size, allowance)
    return errors


def run_case(case: Case, seed: int, grad: bool) -> Outcome:
    right = truth(case, seed, grad)
    if right is None:
        return Outcome({}, False, "", True)
    tensors = {name: laid_out(x.to(case.kind(name)), seed + i) for i, (name, x) in enumerate(case.tensors.items())}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outs, slopes = with_gradients(case, tensors, True, right.grads)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            return Outcome({}, True, "" if any(x in text for x in case.refusals) else text, False)
    said = any(issubclass(c.category, intention.AccuracyWarning) for c in caught)
    return Outcome(compare(case, right, outs, slopes, case.allowance), said, "", False)


class Survey:
    """Counts, errors by group and failures of many cases."""

    def __init__(self) -> None:
        self.count: Counter[tuple[str, str]] = Counter()
        self.errors: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        self.silent: list[str] = []
        self.raised: list[str] = []

    def run(self, families: Iterable[str], count: int, start: int, grad: bool) -> Survey:
        order = [name for name in families for _ in range(FAMILIES[name])]
        for i in range(start, start + count):
            family = order[i % len(order)]
            self.one(family, i, grad)
        return self

    def one(self, family: str, seed: int, grad: bool) -> Outcome:
        case = make_case(family, seed, grad)
        outcome = run_case(case, seed, grad)
        self.count[family, "calls"] += 1
        self.count[family, "undecided"] += outcome.undecided
        self.count[family, "warned"] += outcome.said and not outcome.raised
        if outcome.raised:
            self.raised.append(f"{outcome.raised} | {case.label}")
        kind = "autocast" if case.autocast else str(case.dtype).removeprefix("torch.")
        wrong = []
        self.count[family, "run only"] += case.allowance > LOOSE
        for name, error in outcome.errors.items():
            what = "gradient" if name.startswith("grad") else "value"
            if not outcome.said:
                if case.allowance <= LOOSE:
                    self.errors[family, kind, what].append(error)
                if not error <= WRONG:
                    wrong.append(f"{name} {error:.1e}")
        if wrong:
            self.silent.append(f"{', '.join(wrong)} | {case.label}")
        return outcome

    def share(self, kind: str, what: str, below: float) -> float:
        all_errors = [x for (_, k, w), group in self.errors.items() if (k, w) == (kind, what) for x in group]
        return sum(x < below for x in all_errors) / max(len(all_errors), 1)

    def report(self) -> str:
        lines = []
        families = list(dict.fromkeys(family for family, _ in self.count))
        for family in families:
            names = ("calls", "warned", "undecided", "run only")
            calls, warned, undecided, loose = (self.count[family, x] for x in names)
            lines.append(
                f"{family}: {calls} calls, {warned} warned or refused, {undecided} undecided, {loose} run only"
            )
        lines.append(f"{len(self.raised)} raised, {len(self.silent)} silently wrong")
        for (family, kind, what), group in sorted(self.errors.items()):
            x = torch.tensor(group, dtype=torch.float64)
            below = [f"{(x < limit).double().mean().item():.2%} < {limit:g}" for limit in (1e-5, 1e-4)]
            spread = f"median {x.median():.1e}  worst {x.max():.1e}  {'  '.join(below)}"
            lines.append(f"  {family:12s} {kind:9s} {what:9s} {len(group):6d}  {spread}")
        for what in ("value", "gradient"):
            lines.append(f"float32 {what}s below 1e-5: {self.share('float32', what, CLOSE):.2%}")
        return "\n".join(lines)
