"""The accuracy fuzz: float32 problems of every condition against a float64 SVD.

    python tests/fuzzing.py --count 5000            # predictions
    python tests/fuzzing.py --count 5000 --grad     # gradients

A case counts as wrong when its relative error is above 1e-3 and nothing was said; that must never happen.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

import intention
from intention import functional as F

ALPHAS = (0.0, 1e-6, 1e-3, 1.0)
NAMES = ("query", "key", "value", "alpha", "weight")


class Case(NamedTuple):
    """One problem; the tensors are float32 numbers held in float64."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    alpha: float
    grad: Tensor
    label: str


def make_case(seed: int, grad: bool) -> Case:
    gen = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=gen, dtype=torch.float64))

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=gen))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    form = ("tall", "wide", "square")[integer(0, 2)]
    small, extra = integer(1, 48), integer(1, 96)
    n, d = {"tall": (small + extra, small), "wide": (small, small + extra), "square": (small, small)}[form]
    m, k = integer(1, 32), integer(1, 24)
    alpha = ALPHAS[integer(1 if grad else 0, 3)]
    cond = 10 ** uniform(0, 6 if alpha == 0 else 8)
    rank = min(n, d)
    s = torch.logspace(0, 0 if rank == 1 else -float(torch.tensor(cond).log10()), rank, dtype=torch.float64)
    left, right = torch.linalg.qr(normal(n, rank))[0], torch.linalg.qr(normal(d, rank))[0]
    key = (left * s) @ right.mT * 10 ** uniform(-1, 2)
    query = normal(m, d) if integer(0, 1) else normal(m, n) @ key  # anywhere, or where the keys are
    value = normal(n, k) if integer(0, 1) else key @ normal(d, k) / key.norm() + 0.01 * normal(n, k)
    weight = torch.rand(n, generator=gen, dtype=torch.float64) * (torch.rand(n, generator=gen) > 0.2)
    weight[integer(0, n - 1)] = 1.0
    if integer(0, 1):
        weight = torch.ones(n, dtype=torch.float64)  # gradients: run without weights
    label = f"{form} n={n} d={d} m={m} k={k} alpha={alpha:g} cond={cond:.1e} seed={seed}"
    rounded = [x.float().double() for x in (query, key, value, weight, normal(m, k))]
    return Case(*rounded[:4], float(torch.tensor(alpha).float()), rounded[4], label)


def oracle(case: Case) -> Tensor:
    """Q V diag(s / (s^2 + alpha)) U'V: the float64 answer."""
    u, s, vt = torch.linalg.svd(case.key, full_matrices=False)
    shrunk = torch.where(s > 1e-13 * s.amax(), s / (s.square() + case.alpha), 0.0)
    return case.query @ (vt.mT @ (shrunk[:, None] * (u.mT @ case.value)))


def oracle_gradients(case: Case) -> tuple[Tensor, ...]:
    """Gradients of <grad, Q W> for query, key, value, alpha and weight, from a float64 SVD of sqrt(w) K."""
    root = case.weight.sqrt()[:, None]
    u, s, vt = torch.linalg.svd(root * case.key, full_matrices=True)
    spectrum = torch.zeros(case.key.shape[1], dtype=torch.float64)
    spectrum[: s.numel()] = s.square()
    rank = s.numel()
    w_along = (s / (s.square() + case.alpha))[:, None] * (u[:, :rank].mT @ (root * case.value))  # W in the basis of vt
    z_along = (1 / (spectrum + case.alpha))[:, None] * (vt @ (case.query.mT @ case.grad))
    w, z = vt.mT[:, :rank] @ w_along, vt.mT @ z_along
    # V - KW and KZ cancel where the fit is close: where w > 0 they come from the weighted ones, which do not
    left = torch.ones(u.shape[0], dtype=torch.float64)
    left[:rank] = case.alpha / (s.square() + case.alpha)
    there, safe = root > 0, torch.where(root > 0, root, 1.0)
    rest = torch.where(there, u @ (left[:, None] * (u.mT @ (root * case.value))) / safe, case.value - case.key @ w)
    reach = torch.where(there, u[:, :rank] @ (s[:, None] * z_along[:rank]) / safe, case.key @ z)
    point = case.weight[:, None]
    return (
        case.grad @ w.mT,
        point * (rest @ z.mT - reach @ w.mT),
        point * reach,
        -(z_along[:rank] * w_along).sum(),
        (reach * rest).sum(-1),
    )


def relative(got: Tensor, want: Tensor) -> float:
    size = want.norm().item()
    gap = (got.double() - want).norm().item()
    return gap / size if size else gap


class Outcome(NamedTuple):
    errors: dict[str, float]
    said: bool  # an AccuracyWarning, or an exception
    raised: str
    route: str


def run_case(case: Case, grad: bool) -> Outcome:
    """The relative errors of one float32 call, and whether it said anything."""
    q, k, v, w = (x.float() for x in (case.query, case.key, case.value, case.weight))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            if not grad:
                out, info = F.intention(q, k, v, alpha=case.alpha, return_info=True)
                errors = {"prediction": relative(out, oracle(case))}
            else:
                alpha = torch.tensor(case.alpha)
                plain = bool((case.weight == 1).all())  # no weights: float32 all the way where that is enough
                leaves = [x.requires_grad_() for x in ((q, k, v, alpha) if plain else (q, k, v, alpha, w))]
                out, info = F.intention(q, k, v, alpha=alpha, weight=None if plain else w, return_info=True)
                got = torch.autograd.grad(out, leaves, case.grad.float())
                errors = {n: relative(g, x) for n, g, x in zip(NAMES, got, oracle_gradients(case), strict=False)}
        except Exception as error:
            return Outcome({}, True, f"{type(error).__name__}: {error}", "none")
    said = any(issubclass(c.category, intention.AccuracyWarning) for c in caught)
    return Outcome(errors, said, "", F.ROUTES[int(info.route)])


def survey(
    count: int, grad: bool, start: int = 0
) -> tuple[dict[str, list[float]], list[str], list[str], int, Counter[str]]:
    """Errors by name, silent failures, exceptions, number of warnings, and how often each route ran."""
    errors: dict[str, list[float]] = {}
    silent, raised, warned, routes = [], [], 0, Counter()
    for seed in range(start, start + count):
        case = make_case(seed, grad)
        outcome = run_case(case, grad)
        routes[outcome.route] += 1
        warned += outcome.said and not outcome.raised
        if outcome.raised:
            raised.append(f"{outcome.raised} | {case.label}")
        for name, error in outcome.errors.items():
            errors.setdefault(name, []).append(error)
            if not error <= 1e-3 and not outcome.said:
                silent.append(f"{name} {error:.1e} by {outcome.route} | {case.label}")
    return errors, silent, raised, warned, routes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--grad", action="store_true", help="gradients instead of predictions")
    args = parser.parse_args()
    errors, silent, raised, warned, routes = survey(args.count, args.grad, args.start)
    below = 1e-4 if args.grad else 1e-5
    print(f"{args.count} cases, routes {dict(routes)}")
    print(f"{warned} warned, {len(raised)} raised, {len(silent)} silently wrong")
    enough = True
    for name, values in errors.items():
        x = torch.tensor(values)
        share = (x < below).double().mean().item()
        enough &= share >= 0.99
        spread = f"median {x.median():.1e}  99% {x.quantile(0.99):.1e}  worst {x.max():.1e}"
        print(f"  {name:10s} {spread}  below {below:g}: {share:.2%}")
    print("\n".join((silent + raised)[:40]))
    return 0 if enough and not silent and not raised else 1


if __name__ == "__main__":
    sys.exit(main())
