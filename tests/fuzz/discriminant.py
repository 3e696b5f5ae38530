"""lda by both routes, qda and ls_svm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz import oracle
from fuzz.draw import Case, Draw, Tensors
from intention import discriminant


def make(seed: int, grad: bool) -> Case:
    draw = Draw(seed)
    dtype = draw.choice((torch.float32, torch.float64))
    kind = draw.choice(("lda", "total", "qda", "ls_svm"), (0.35, 0.25, 0.2, 0.2))
    lead = draw.choice(((), (2,), (2, 3)), (0.5, 0.3, 0.2))
    c, d, m = draw.integer(2, 4), draw.integer(1, 9), draw.integer(1, 7)
    n = c * draw.integer(1, 7) + draw.integer(0, 4)
    key, text = draw.keys(lead, n, d, dtype, easy=True)
    labels = torch.arange(n) % c
    options: dict[str, Any] = {"alpha": draw.choice((0.0, 1e-3, 0.1, 1.0))}
    if kind == "qda" or grad:
        options["alpha"] = max(options["alpha"], 1e-3)
    if kind != "ls_svm":
        options |= {"shrinkage": draw.choice((0.0, 0.0, 0.1, 0.5)), "ddof": draw.choice((0, 0, 1)) if n > 3 * c else 0}
    spread = draw.choice((0.0, 1.0, 10.0)) * (draw.normal(c, d) @ torch.eye(d, dtype=torch.float64))
    tensors: Tensors = {"key": key + spread[labels], "query": draw.queries(lead, m, key, 0.5)}
    if draw.chance(0.4):
        weight = draw.weights(lead, n)
        weight[..., :c] = 1.0  # every class has a point
        tensors["weight"] = weight
    if draw.chance(0.3):
        prior = draw.rand(c) + 0.1
        options["priors"] = prior / prior.sum()
    if kind == "ls_svm" or draw.chance(0.5):
        labels = labels[torch.randperm(n, generator=draw.gen)] if "weight" not in tensors else labels
    numbers = {x: y for x, y in options.items() if x != "priors"}
    label = f"{kind} n={n} c={c} d={d} m={m} lead={lead} {numbers} {text} {sorted(tensors)} {'priors' in options}"
    return Case(
        "discriminant",
        label,
        dtype,
        tensors,
        lambda t: {"logits": call(kind, t, labels, options)},
        lambda t: {"logits": expected(kind, t, labels, options)},
        tuple(tensors),
        refusals=("lie so far apart", "leaves nothing of a total weight", "the covariance of a class is singular"),
    )


def call(kind: str, t: Tensors, labels: Tensor, options: dict[str, Any]) -> Tensor:
    rest = {"route": "total"} if kind == "total" else {}
    make = getattr(discriminant, "lda" if kind == "total" else kind)
    return make(t["key"], labels, weight=t.get("weight"), **options, **rest)(t["query"])


def expected(kind: str, t: Tensors, labels: Tensor, options: dict[str, Any]) -> Tensor:
    query, key = t["query"], t["key"]
    value = torch.nn.functional.one_hot(labels).double().expand(*key.shape[:-1], -1)
    mass = t.get("weight", torch.ones(key.shape[:-1], dtype=torch.float64)).expand(key.shape[:-1])
    sizes = (value * mass[..., None]).sum(-2)
    total = sizes.sum(-1, keepdim=True)
    prior = options.get("priors", sizes / total).expand(sizes.shape)
    alpha = torch.full(key.shape[:-2], options["alpha"], dtype=torch.float64)
    if kind != "qda":  # every class has the mass of its prior
        mass = mass * (value @ (prior * total / sizes)[..., None])[..., 0]
    if kind == "ls_svm":
        return oracle.intention(query, key, 2 * value - 1, mass, alpha, intercept=True)
    if kind == "qda":
        logits = [quadratic(query, key, value[..., i] * mass, alpha, options) for i in range(value.shape[-1])]
        return torch.stack(logits, -1) + prior.log()[..., None, :]
    # r S^-1 m_c - m_c S^-1 m_c / 2 + log prior_c, around the mean of all points
    mass = mass / (mass.sum(-1, keepdim=True) - options["ddof"])
    centre = oracle.mean(key, mass)
    key, query = key - centre, query - centre
    share = value.mT * mass[..., None, :]
    means = share / share.sum(-1, keepdim=True) @ key
    solved = shrunk(oracle.deviations(key, value, mass), mass, alpha, options, means.mT)
    return query @ solved - (means * solved.mT).sum(-1)[..., None, :] / 2 + prior.log()[..., None, :]


def shrunk(x: Tensor, mass: Tensor, alpha: Tensor, options: dict[str, Any], right: Tensor) -> Tensor:
    """((1 - s) X'MX + (s trace / d + alpha) I)^-1 R"""
    s = options["shrinkage"]
    square = (mass[..., None] * x.square()).sum((-2, -1)) / x.shape[-1]
    return oracle.solve(x, (1 - s) * mass, alpha + s * square, right)


def quadratic(query: Tensor, key: Tensor, mass: Tensor, alpha: Tensor, options: dict[str, Any]) -> Tensor:
    """-((q - m) S^-1 (q - m)' + log det S) / 2"""
    mass = mass / (mass.sum(-1, keepdim=True) - options["ddof"])
    centre = oracle.mean(key, mass)
    x, q, s = key - centre, query - centre, options["shrinkage"]
    solved = shrunk(x, mass, alpha, options, q.mT)
    level = alpha + s * (mass[..., None] * x.square()).sum((-2, -1)) / x.shape[-1]
    matrix = (1 - s) * x.mT @ (mass[..., None] * x) + torch.diag_embed(
        level[..., None].expand(*level.shape, x.shape[-1])
    )
    return -((q * solved.mT).sum(-1) + torch.logdet(matrix)[..., None]) / 2
