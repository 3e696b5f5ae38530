"""fit, its answers, and points that come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz import oracle
from fuzz.draw import Case, Draw, Tensors
from intention import fit, kernels

SPACES = ("linear", "gaussian", "laplacian", "polynomial")


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    dtype, _ = draw.dtype()
    lead = draw.choice(((), (2,), (2, 3)), (0.5, 0.3, 0.2))
    n, d, m, k = draw.integer(1, 22), draw.integer(1, 13), draw.integer(1, 9), draw.integer(1, 4)
    if draw.chance(0.08):
        lead, n, d = (), draw.integer(1, 70), draw.integer(1, 96)
    space = draw.choice(SPACES, (0.8, 0.1, 0.05, 0.05))
    covariance = "ridge" if space != "linear" else draw.choice(("ridge", "convex", "within"), (0.6, 0.25, 0.15))
    intercept, kept = draw.chance(0.4), space != "linear" or draw.chance(0.75)
    plan = [draw.choice(("add", "remove", "merge", "forget", "drop")) for _ in range(draw.choice((0, 0, 1, 2, 3)))]
    if not kept or space != "linear" or covariance == "within":
        plan = [x for x in plan if x == "add" or (x == "forget" and space == "linear")]
        plan = [] if covariance == "within" else plan
    least = 1e-3 if space != "linear" else 1e-6 if grad or covariance == "within" or not kept or plan else 0.0
    alpha = draw.alpha(covariance, least)
    key, text = draw.keys(lead, n, d, dtype, easy=space != "linear")
    if space != "linear":
        key = key / key.abs().amax().clamp_min(1e-9)
    tensors: Tensors = {"query": draw.queries(lead, m, key, 0.5), "key": key, "value": draw.values(lead, key, k)}
    if covariance == "within":
        k += 1  # of one class the values are the intercept
        labels = torch.randint(0, k, (*lead, n), generator=draw.gen)
        tensors["value"] = torch.nn.functional.one_hot(labels, k).double()
    if grad or draw.chance(0.3):
        tensors["alpha"] = torch.full(draw.choice(((), lead)), alpha, dtype=torch.float64)
    if draw.chance(0.4):
        tensors["weight"] = draw.weights(lead, n)
    more = draw.integer(1, 5)
    if {"add", "merge"} & set(plan):
        tensors["more key"] = draw.keys(lead, more, d, dtype, easy=True)[0] + key[..., :1, :]
        tensors["more value"] = draw.normal(*lead, more, k)
        if "weight" in tensors:
            tensors["more weight"] = draw.weights(lead, more)
    plan = list(dict.fromkeys(plan))  # each once
    if "drop" in plan and n < 3:
        plan.remove("drop")
    asked = ["out"]
    if not grad:
        asked += [x for x in ("w", "variance", "leverage", "leave_one_out") if draw.chance(0.4)]
    if covariance == "within":
        asked = [x for x in asked if x in ("out", "w")]
    if not kept:
        asked = [x for x in asked if x not in ("leverage", "leave_one_out")]
    if space != "linear":
        asked = [x for x in asked if x == "out"]
    if alpha == 0:  # of directions that no point has the variance is that before the fit, and a point may be the rank
        asked = [x for x in asked if x not in ("variance", "leave_one_out") or (x != "variance" and d <= n)]
    settings = {"intercept": intercept, "covariance": covariance, "keep_points": kept}
    label = (
        f"{space} n={n} d={d} m={m} k={k} lead={lead} alpha={alpha:g} {settings} {plan} {asked[1:]} {text} "
        + " ".join(f"{x}={tuple(tensors[x].shape)}" for x in ("alpha", "weight") if x in tensors)
    )
    kinds = dict.fromkeys(
        ("alpha", "weight", "more weight"), torch.float64 if dtype == torch.float64 else torch.float32
    )
    leaves = tuple(x for x in tensors if covariance != "within" or "value" not in x)
    return Case(
        "context",
        label,
        dtype,
        tensors,
        lambda t: call(t, settings, alpha, space, plan, asked),
        lambda t: expected(t, settings, alpha, space, plan, asked),
        leaves,
        kinds=kinds,
        refusals=("needs alpha > 0",),
    )


def call(t: Tensors, settings: dict[str, Any], alpha: float, space: str, plan: list[str], asked: list[str]) -> Tensors:
    rest = dict(settings)
    if space == "polynomial":
        rest["kernel"] = kernels.Polynomial(degree=2, gamma=0.5)
    elif space != "linear":
        rest["kernel"] = (kernels.Gaussian if space == "gaussian" else kernels.Laplacian)(gamma=0.5)
    regular: Any = t.get("alpha", alpha)
    context = fit(t["key"], t["value"], regular, t.get("weight"), **rest)
    for step in plan:
        if step == "add":
            context = context.add(t["more key"], t["more value"], t.get("more weight"))
        elif step == "merge":
            other = fit(t["more key"], t["more value"], regular, t.get("more weight"), **rest)
            context = context.merge(other)
        elif step == "forget":
            context = context.forget(0.75)
        elif step == "drop":
            context = context.without_points()
        elif step == "remove" and context.key is not None:
            gone = slice(0, context.key.shape[-2] // 3)
            weight = None if context.weight is None else context.weight[..., gone]
            context = context.remove(context.key[..., gone, :], context.value[..., gone, :], weight)  # type: ignore[index]
    points = {"w": lambda: context.w, "variance": lambda: context.variance(t["query"])}
    points |= {"leverage": lambda: context.leverage(), "leave_one_out": lambda: context.leave_one_out()}
    answers = {"out": context(t["query"])}
    for name in asked[1:]:
        if context.key is not None or name not in ("leverage", "leave_one_out"):
            answers[name] = points[name]()
    return answers


def after(t: Tensors, plan: list[str]) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Points and their counts after all updates, and whether they are kept."""
    key, value = t["key"], t["value"]
    count = t.get("weight", torch.ones(key.shape[:-1], dtype=torch.float64)).expand(key.shape[:-1])
    kept = True
    for step in plan:
        if step in ("add", "merge"):
            more = t["more key"]
            own = t.get("more weight", torch.ones(more.shape[:-1], dtype=torch.float64))
            key, value = torch.cat([key, more], -2), torch.cat([value, t["more value"]], -2)
            count = torch.cat([count, own], -1)
        elif step == "forget":
            count = 0.75 * count
        elif step == "drop":
            kept = False
        elif step == "remove" and kept:
            gone = key.shape[-2] // 3
            key, value, count = key[..., gone:, :], value[..., gone:, :], count[..., gone:]
    return key, value, count, kept


def expected(
    t: Tensors, settings: dict[str, Any], alpha: float, space: str, plan: list[str], asked: list[str]
) -> Tensors:
    query, (key, value, count, kept) = t["query"], after(t, plan)
    a = t.get("alpha", torch.tensor(alpha, dtype=torch.float64)).expand(key.shape[:-2])
    intercept, covariance = settings["intercept"], settings["covariance"]
    if space != "linear":
        return {"out": kernel_fit(query, key, value, count, a, intercept, space)}
    answers = {"out": oracle.intention(query, key, value, count, a, intercept, covariance)}
    centre = oracle.mean(key, count) if intercept else torch.zeros_like(key[..., :1, :])
    total = count.sum(-1, keepdim=True)

    def spread(x: Tensor, y: Tensor) -> Tensor:
        """x Sigma^-1 y', row by row"""
        solved = oracle.solve_sigma(key - centre, value, count, a, covariance, (y - centre).mT)
        return ((x - centre) * solved.mT).sum(-1)

    level = a / (1 - a) if covariance == "convex" else a
    for name in asked[1:]:
        if name == "w":
            d = key.shape[-1]
            points = torch.eye(d, dtype=torch.float64).expand(*key.shape[:-2], d, d) + centre
            mean = oracle.mean(value, count) if intercept else 0.0
            answers[name] = oracle.intention(points, key, value, count, a, intercept, covariance) - mean
        elif name == "variance":
            answers[name] = a[..., None] * spread(query, query) + (level[..., None] / total if intercept else 0.0)
        elif name == "leverage" and kept:
            answers[name] = count * (spread(key, key) + (1 / total if intercept else 0.0))
        elif name == "leave_one_out" and kept:
            n = key.shape[-2]
            others = count[..., None, :] * (1 - torch.eye(n, dtype=torch.float64))
            answers[name] = value - oracle.each(
                oracle.intention, key, key, value, others, a, intercept=intercept, covariance=covariance
            )
    return answers


def kernel_fit(
    query: Tensor, key: Tensor, value: Tensor, count: Tensor, alpha: Tensor, intercept: bool, space: str
) -> Tensor:
    """k(Q, K) (K C + alpha I)^-1 (V - b), b from the condition that the coefficients sum to 0"""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        if space == "polynomial":
            return (0.5 * x @ y.mT + 1) ** 2
        away = x[..., :, None, :] - y[..., None, :, :]
        return (-0.5 * (away.square() if space == "gaussian" else away.abs()).sum(-1)).exp()

    system = kernel(key, key) * count[..., None, :] + torch.diag_embed(alpha[..., None].expand(count.shape))
    solved = torch.linalg.solve(system, torch.cat([value, torch.ones_like(value[..., :1])], -1))
    first, one = solved[..., :-1], solved[..., -1:]
    constant: Any = 0.0
    if intercept:
        total = (count[..., None] * one).sum(-2, keepdim=True)
        constant = (count[..., None] * first).sum(-2, keepdim=True) / torch.where(total > 0, total, 1.0)
    return kernel(query, key) @ (count[..., None] * (first - one * constant)) + constant
