"""Contexts that are split over ranks, against one process that has all points.

Each `check_*` runs on every rank of a gloo process group (this file, started as a script); a test starts the ranks and
reads what they say.
"""

import contextlib
import datetime
import functools
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import intention
from intention import distributed
from intention import functional as F
from intention.context.points import Sums
from intention.distributed import moments

D = torch.float64
TOLERANCE = {torch.float32: 1e-5, D: 1e-10}
ROOT = Path(__file__).parents[2]
# points of each rank: unequal, with an empty rank, and fewer points than features (d = 7)
SIZES = {2: [(14, 9), (0, 11), (1, 3)], 4: [(3, 9, 0, 11)]}


def close(got, want, tol):
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype
    error, size = (got.double() - want.double()).norm().item(), want.double().norm().item()
    assert error <= tol * size, f"relative error {error / size if size else error:.1e}, wanted {tol:.1e}"


def mine(x, sizes, dim):
    """This rank's share of what all ranks have."""
    return x.detach().split(sizes, dim)[dist.get_rank()].clone()


def total(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def drawn(sizes, covariance="ridge", lead=(2, 3), d=7, k=3, m=5, dtype=D, offset=0.0, weighted=False, mask=None):
    """The inputs of all ranks, the same on every rank."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=D)

    n = sum(sizes)
    key, query = randn(*lead, n, d) + offset, randn(*lead, m * len(sizes), d) + offset
    value = randn(*lead, n, k) + offset
    if covariance == "within":
        value = torch.eye(k, dtype=D)[torch.arange(n) % k].expand(*lead, n, k)
    weight = randn(*lead, n).square() if weighted else None
    if weighted and covariance != "within":  # the last point of a class has no derivative at 0
        weight[..., 0] = 0
    masked = None
    if mask is not None:
        keep = torch.rand(lead[0], 1, 1, n, generator=generator) > 0.3
        masked = keep if mask == "bool" else torch.where(keep, randn(*keep.shape), -torch.inf)
        if mask == "bool":
            key, value = key.masked_fill(~keep.mT, torch.nan), value.masked_fill(~keep.mT, torch.nan)
    floats = {"query": query, "key": key, "value": value, "weight": weight, "mask": masked}
    return {name: x if x is None or x.dtype == torch.bool else x.to(dtype) for name, x in floats.items()}


def leaves(inputs):
    """Each of them a leaf that wants a gradient, where it can."""
    return {name: x if x is None or x.dtype == torch.bool else x.clone().requires_grad_() for name, x in inputs.items()}


def shared(inputs, sizes, replicated=False):
    """What this rank has of the inputs of all."""
    dims = {"query": -2, "key": -2, "value": -2, "weight": -1, "mask": -1}
    m = inputs["query"].shape[-2] // len(sizes)
    out = {}
    for name, x in inputs.items():
        parts = [m] * len(sizes) if name == "query" else list(sizes)
        whole = x is None or (name == "query" and replicated)
        out[name] = x if whole else mine(x, parts, dims[name])
    return out


def called(function, inputs, alpha, **options):
    names = ("query", "key", "value", "mask")
    return function(*(inputs[name] for name in names), weight=inputs["weight"], alpha=alpha, **options)


def compare(sizes, replicated=False, alpha=0.3, scale=None, covariance="ridge", intercept=False, tol=None, **draw):
    """Outputs and gradients of all ranks are those of one process."""
    inputs = drawn(sizes, covariance, **draw)
    dtype = inputs["key"].dtype
    tol = TOLERANCE[dtype] if tol is None else tol
    options = {"covariance": covariance, "intercept": intercept, "scale": scale}
    alphas = [alpha] * 2
    if alpha:
        alphas = [torch.full((3,), alpha, dtype=dtype, requires_grad=True) for _ in range(2)]
    one = leaves(inputs)
    whole = called(F.intention, one, alphas[0], **options)
    slope = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=D).to(dtype)
    (whole * slope).sum().backward()
    own = leaves(shared(inputs, sizes, replicated))
    out = called(distributed.intention, own, alphas[1], replicated_query=replicated, **options)
    m = whole.shape[-2] if replicated else whole.shape[-2] // len(sizes)
    parts = [m] * len(sizes)
    (out * (slope if replicated else mine(slope, parts, -2))).sum().backward()
    close(out.detach(), whole.detach() if replicated else mine(whole, parts, -2), tol)
    grads = {name: None if x is None else x.grad for name, x in one.items()}
    if covariance == "within":
        grads["value"] = own["value"].grad = None  # labels
    wanted = shared(grads, sizes, replicated)
    for name, want in wanted.items():
        if want is None:
            assert own[name] is None or own[name].grad is None, name
        else:
            error = (own[name].grad.double() - want.double()).norm()
            size = max(grads[name].double().norm(), 0.1)  # a single point and an intercept: w is 0
            assert error <= tol * size, f"gradient of {name}: {error / size:.1e}"
    if alpha:
        got = alphas[1].grad if replicated else total(alphas[1].grad)  # pyright: ignore[reportAttributeAccessIssue]
        close(got, alphas[0].grad, tol)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def sent():
    """The number of elements that are handed to all_reduce meanwhile, call by call."""
    told, real = [], dist.all_reduce

    def counting(x, *args, **kwargs):
        told.append(x.numel())
        return real(x, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield told
    finally:
        dist.all_reduce = real


def check_values_and_gradients():
    for sizes in SIZES[dist.get_world_size()]:
        for covariance in ("ridge", "convex", "within"):
            for intercept in (False, True):
                for replicated in (False, True):
                    compare(sizes, replicated, covariance=covariance, intercept=intercept)
                compare(sizes, covariance=covariance, intercept=intercept, weighted=True, scale=0.5)
                compare(sizes, covariance=covariance, intercept=intercept, mask="bool")


def check_float32():
    for sizes in SIZES[dist.get_world_size()]:
        for covariance in ("ridge", "convex", "within"):
            compare(sizes, covariance=covariance, dtype=torch.float32, intercept=True)
            compare(sizes, covariance=covariance, dtype=torch.float32, weighted=True)


def check_log_weights():
    for sizes in SIZES[dist.get_world_size()]:
        compare(sizes, mask="float")
        compare(sizes, mask="float", weighted=True, intercept=True, replicated=True)


def check_alpha_zero():
    """The minimum-norm fit: more points than features, and fewer."""
    for sizes in SIZES[dist.get_world_size()]:
        compare(sizes, alpha=0)
        compare(sizes, alpha=0, intercept=True, tol=1e-9)


def check_far_from_the_origin():
    sizes = SIZES[dist.get_world_size()][0]
    compare(sizes, intercept=True, offset=1e4, tol=1e-9)
    compare(sizes, intercept=True, offset=1e4, weighted=True, tol=1e-9)
    compare(sizes, intercept=True, offset=1e2, dtype=torch.float32)


def check_leading_dimensions():
    """Without any, and keys that several values share: then K'WK is sent once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    sizes = SIZES[world][0]
    n = sum(sizes)
    key, value, query = (torch.randn(*s, dtype=D, generator=generator) for s in ((n, 7), (4, n, 3), (2, 1, 5, 7)))
    weight = torch.rand(1, n, dtype=D, generator=generator)
    parts = mine(key, sizes, -2), mine(value, sizes, -2)
    with sent() as told:
        got = distributed.intention(query, *parts, weight=mine(weight, sizes, -1), intercept=True)
    close(got, F.intention(query, key, value, weight=weight, intercept=True), 1e-10)
    assert told == [4, 1 + 7 + 4 * 3, 28 + 4 * 7 * 3 + 7]
    close(distributed.intention(query[0, 0], parts[0], parts[1][0]), F.intention(query[0, 0], key, value[0]), 1e-10)
    empty = key[:0], value[0, :0]
    for alpha in (0.0, 1.0):
        assert not distributed.intention(query, *empty, alpha=alpha, intercept=True).any()  # no points at all
    for alpha in (rank * 1.0, torch.tensor(rank * 1.0)):
        with pytest.raises(ValueError, match=r"alpha 1\.0"):
            distributed.fit(*parts, alpha=alpha)


def check_what_is_sent():
    """B (1 + d + k) and B (d (d + 1) / 2 + d k + d) numbers, whatever N is, and the same in the backward."""
    b, d, k = 6, 7, 3
    wanted = [b * (1 + d + k), b * (d * (d + 1) // 2 + d * k + d)]
    for n in (5, 500):
        inputs = drawn((n,), lead=(2, 3))
        with sent() as told:
            distributed.fit(inputs["key"], inputs["value"])
        assert told == [4, *wanted], told
        own = leaves(inputs)
        with sent() as told:
            called(distributed.intention, own, 0.3).sum().backward()
        assert told == [4, *wanted, *reversed(wanted)], told


def check_chunks():
    sizes = [2500 + 100 * rank for rank in range(dist.get_world_size())]
    before, moments.CHUNK = moments.CHUNK, 1
    compare(sizes, lead=(1, 3), weighted=True, intercept=True)
    compare(sizes, lead=(1, 3))
    moments.CHUNK = before


def check_second_derivatives():
    """A penalty on the gradient of the keys, of which each rank has its own part."""
    sizes = SIZES[dist.get_world_size()][0]
    inputs = drawn(sizes, weighted=True, offset=1.0)
    for replicated in (False, True):
        one, own = leaves(inputs), leaves(shared(inputs, sizes, replicated))
        over_ranks = functools.partial(distributed.intention, replicated_query=replicated)
        for x, call in ((one, F.intention), (own, over_ranks)):
            loss = called(call, x, 0.3, intercept=True).square().sum()
            (slope,) = torch.autograd.grad(loss, x["key"], create_graph=True)
            slope.square().sum().backward()
        for name in ("key", "value", "weight"):
            want = shared({"query": one["query"], name: one[name].grad}, sizes)[name]
            assert (own[name].grad - want).norm() <= 1e-9 * one[name].grad.norm(), name


def check_a_rank_whose_weights_are_zero():
    """Its points do not count, but the gradients of their weights do."""
    sizes = SIZES[dist.get_world_size()][0]
    inputs = drawn(sizes, weighted=True, offset=3.0)
    inputs["weight"][..., : sizes[0]] = 0
    for intercept in (False, True):
        one, own = leaves(inputs), leaves(shared(inputs, sizes, True))
        over_ranks = functools.partial(distributed.intention, replicated_query=True)
        for x, call in ((one, F.intention), (own, over_ranks)):
            called(call, x, 0.3, intercept=intercept).square().sum().backward()
        close(own["weight"].grad, mine(one["weight"].grad, sizes, -1), 1e-9)


def check_one_rank_wants_a_gradient():
    """The others take part in its backward; none is made where nobody wants one."""
    sizes = SIZES[dist.get_world_size()][0]
    inputs, last = drawn(sizes), dist.get_rank() == dist.get_world_size() - 1
    own, value = shared(inputs, sizes), inputs["value"].clone().requires_grad_()
    own["value"].requires_grad_(last)
    out = called(distributed.intention, own, 0.3)
    out.sum().backward()
    F.intention(inputs["query"], inputs["key"], value, alpha=0.3).sum().backward()
    if last:
        close(own["value"].grad, mine(value.grad, sizes, -2), 1e-10)
    else:
        assert own["value"].grad is None
    own["value"].requires_grad_(False)
    assert not called(distributed.intention, own, 0.3).requires_grad
    with torch.no_grad():
        own["value"].requires_grad_()
        assert not called(distributed.intention, own, 0.3).requires_grad


def check_half_precision_and_autocast():
    """Half inputs are summed in float64; autocast does not touch the sums."""
    sizes = SIZES[dist.get_world_size()][0]
    for dtype in (torch.bfloat16, torch.float16):
        inputs = drawn(sizes, dtype=dtype)
        got = called(distributed.intention, shared(inputs, sizes, True), 0.3)
        wide = {name: None if x is None else x.double() for name, x in inputs.items()}
        close(got, called(F.intention, wide, 0.3).to(dtype), torch.finfo(dtype).eps)
    for dtype in (torch.float32, D):
        own = shared(drawn(sizes, dtype=dtype), sizes)
        plain = called(distributed.intention, own, 0.3, intercept=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(called(distributed.intention, own, 0.3, intercept=True), plain)


def check_contexts():
    """`fit` is intention.fit of all points, kept as sums."""
    sizes = SIZES[dist.get_world_size()][0]
    for covariance in ("ridge", "convex", "within"):
        for intercept in (False, True):
            inputs = drawn(sizes, covariance, weighted=True, offset=2.0 if covariance != "within" else 0.0)
            own, query = shared(inputs, sizes), inputs["query"]
            options = {"alpha": 0.3, "intercept": intercept, "covariance": covariance}
            want = intention.fit(inputs["key"], inputs["value"], weight=inputs["weight"], keep_points=False, **options)
            got = distributed.fit(own["key"], own["value"], weight=own["weight"], **options)
            for a, b in zip(
                (got.w, got.intercept + 1, got(query), got.variance(query), got.free_w()),
                (want.w, want.intercept + 1, want(query), want.variance(query), want.free_w()),
                strict=True,
            ):
                close(a, b, 1e-10)
            more = torch.randn(2, 3, 4, 7, dtype=D), torch.eye(3, dtype=D)[[0, 1, 2, 0]].expand(2, 3, 4, 3)
            close(got.add(*more).merge(got).w, want.add(*more).merge(want).w, 1e-10)
            assert got.describe().error.max() < 10 * want.describe().error.max()


def check_noise():
    """The rounding that sums remember is that of merging what the ranks have: more where they lie far from 0."""
    sizes = SIZES[dist.get_world_size()][0]
    for offset in (0.0, 1e4):
        inputs = drawn(sizes, offset=offset)
        own = shared(inputs, sizes)
        got = distributed.fit(own["key"], own["value"]).stats
        parts = zip(inputs["key"].split(sizes, -2), inputs["value"].split(sizes, -2), strict=True)
        want = functools.reduce(Sums.merge, (Sums.of(*part) for part in parts))
        ratio = got.noise / want.noise
        assert ratio.min() > 0.1, ratio
        assert ratio.max() < 10, ratio
        close(got.scatter, want.scatter, 1e-11)


def check_groups():
    """A group of one is this process; others are not part of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([r]) for r in range(world)]
    inputs = drawn((5 + rank,))
    got = called(distributed.intention, inputs, 0.3, group=groups[rank], intercept=True)
    close(got, called(F.intention, inputs, 0.3, intercept=True), 1e-10)
    for other in (groups[(rank + 1) % world], dist.GroupMember.NON_GROUP_MEMBER):
        with pytest.raises(ValueError, match=f"rank {rank} is no member of this group"):
            called(distributed.intention, inputs, 0.3, group=other)
    if world == 4:
        pair = dist.new_group([1, 3])
        if rank in (1, 3):
            inputs = drawn((9, 4))
            parts = [x.split((9, 4), -2)[rank // 2] for x in (inputs["key"], inputs["value"])]
            close(
                distributed.intention(inputs["query"], *parts, group=pair),
                F.intention(inputs["query"], inputs["key"], inputs["value"]),
                1e-10,
            )


def check_warnings():
    """What sums cannot tell is said, on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    key = torch.randn(20, 2, dtype=D, generator=generator) * torch.tensor([1.0, 1e-7], dtype=D)
    key = key @ torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=D)
    with pytest.warns(intention.AccuracyWarning, match="estimated relative error"):
        distributed.intention(key, key, key, alpha=1e-14)


def check_not_a_number():
    sizes = SIZES[dist.get_world_size()][0]
    inputs = drawn(sizes)
    inputs["key"][0, 0, -1, 0] = torch.nan  # of the last rank
    inputs["value"][1, 0, -1, 2] = torch.inf
    out = called(distributed.intention, shared(inputs, sizes), 0.3, intercept=True)
    lost = torch.zeros(2, 3, 3, dtype=torch.bool)
    lost[0, 0], lost[1, 0, 2] = True, True
    assert torch.equal(out.isnan(), lost.unsqueeze(-2).expand(out.shape))


def check_errors_on_all_ranks():
    """They name what came; no rank is left waiting, and the next call works."""
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank == 0
    key, value = torch.randn(2, 5, 7), torch.randn(2, 5, 3)

    def bad(error, match, key=key, value=value, **options):
        with pytest.raises(error, match=match):
            distributed.fit(key, value, **options)
        assert distributed.fit(torch.ones(2, 4, 7), torch.ones(2, 4, 3)).w.shape == (2, 7, 3)

    same = "(?s)all ranks must be called with the same.*"
    bad(ValueError, same + r"rank 0: key \(2, N, 7\).*rank 1: key \(2, N, 6\)", key=key if first else key[..., :6])
    bad(ValueError, same + r"value \(2, N, 3\).*value \(2, N, 2\)", value=value if first else value[..., :2])
    bad(ValueError, same + r"\(2, N, 7\).*\(1, N, 7\)", *((key, value) if first else (key[:1], value[:1])))
    bad(ValueError, same + "torch.float32, value.*torch.float64, value", key=key if first else key.double())
    bad(ValueError, same + "intercept=True.*intercept=False", intercept=first)
    bad(ValueError, same + "'ridge'.*'convex'", covariance="ridge" if first else "convex")
    bad(ValueError, same + "replicated_query=False.*replicated_query=True", replicated_query=not first)
    with torch.set_grad_enabled(first), pytest.raises(ValueError, match=same + "no_grad"):
        distributed.fit(key, value)
    # one rank has a reason of its own: it says so, the others repeat it
    weight, wrong = torch.ones(2, 5), -torch.ones(2, 5)
    name = f"(?s)another rank of {world} cannot take part:\n  rank 0: "
    kinds = (
        (ValueError, "weight must be >= 0, got -1.0") if first else (RuntimeError, name + "ValueError: weight must be")
    )
    bad(*kinds, weight=wrong if first else weight)
    kinds = (TypeError, "key must be a torch.Tensor") if first else (RuntimeError, name + "TypeError: key must be")
    bad(*kinds, key=[1.0] if first else key)
    alpha = torch.tensor(-1.0 if first else 1.0)
    bad(*((ValueError, "alpha must be") if first else (RuntimeError, name + "ValueError: alpha must be")), alpha=alpha)
    # all have the same
    bad(ValueError, "a callable covariance sees the points", covariance=lambda key, value, weight: key.mT @ key)
    bad(TypeError, "alpha must be a number or a tensor, got 'loo': leave-one-out needs the points", alpha="loo")
    bad(ValueError, "alpha must be finite and >= 0, got -1", alpha=-1)
    bad(ValueError, "one-hot values", covariance="within")
    bad(ValueError, "covariance must be one of", covariance="lasso")


def check_errors_of_intention():
    query, key, value = torch.randn(4, 7), torch.randn(5, 7), torch.randn(5, 3)
    mask = torch.rand(4, 5) > 0.5
    with pytest.raises(ValueError, match=r"attn_mask must be equal for all queries, .*got \(4, 5\)"):
        distributed.intention(query, key, value, mask)
    with pytest.raises(TypeError, match="scale must be a number"):
        distributed.intention(query, key, value, scale="auto")
    with pytest.raises(RuntimeError, match=r"outside of torch.compile and torch.func"):
        torch.func.grad(lambda key: distributed.intention(query, key, value).sum())(key)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(key, key)
        with pytest.raises(RuntimeError, match="You must implement the jvp function"):
            distributed.intention(query, dual, value)


# -- training ----------------------------------------------------------------------------------------------------------


class Split(nn.Module):
    """The context of a batch is split over ranks, each with queries of its own; everything is learnt."""

    def __init__(self, call=distributed.intention):
        super().__init__()
        self.embed_query, self.embed_key = nn.Linear(3, 5), nn.Linear(3, 5)
        self.theta, self.call = nn.Parameter(torch.zeros(1)), call

    def forward(self, query, key, value):
        query, key = self.embed_query(query), self.embed_key(key).relu()
        return self.call(query, key, value, alpha=self.theta.exp(), intercept=True)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        embed = nn.Linear(3, 5)
        alpha = intention.nn.LearnableAlpha(0.5)
        self.head = intention.nn.Intention(alpha, embed_query=embed, embed_key=embed, embed_value=nn.Linear(2, 2))

    def forward(self, query, key, value):
        return self.head(query, key, value)


class Former(nn.Module):
    """The layers, one after the other, on keys and values as one sequence of tokens."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 8), nn.Linear(8, 2)
        self.layer = intention.nn.InformerLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.mixer = intention.nn.MultiheadIntention(8, 2, batch_first=True)

    def forward(self, query, key, value):
        context = self.layer(self.enter(torch.cat([key, value], -1)))
        query = self.enter(torch.cat([query, torch.zeros_like(query[..., :2])], -1))
        return self.leave(self.mixer(query, context, context, need_weights=False)[0])


def trained(model, batches, steps=3):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimiser.zero_grad()
        query, key, value, target = batches[step]
        (model(query, key, value) - target).square().mean().backward()
        optimiser.step()
    return {
        name.removeprefix("module."): (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()
        for name, x in model.named_parameters()
    }


def batches(steps=3):
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 6, 3), (4, 8, 3), (4, 8, 2), (4, 6, 2)
    return [[torch.randn(*size, generator=generator) for size in sizes] for _ in range(steps)]


def halves(kind):
    """Each rank has half of the tasks; of a split context half of the points and half of the queries."""
    dim = 1 if kind is Split else 0
    return [[x.chunk(2, dim)[dist.get_rank()] for x in batch] for batch in batches()]


def model_of(kind):
    torch.manual_seed(3)
    return kind()


def check_training(wrap):
    kinds = [Split, Head] + ([Former] if hasattr(intention.nn, "MultiheadIntention") else [])
    for kind in kinds:
        one = model_of(kind)
        if kind is Split:
            one.call = F.intention
        start = {name: x.detach().clone() for name, x in one.named_parameters()}
        want = trained(one, batches())
        got = trained(wrap(model_of(kind)), halves(kind))
        assert got.keys() == want.keys()
        for name, x in want.items():
            assert (x - start[name]).norm() > 1e-4, name  # it did learn
            close(got[name], x, 1e-5)


def check_distributed_data_parallel():
    check_training(nn.parallel.DistributedDataParallel)


def check_fully_sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    # torch's advice not to change such outputs in place; a batch of fits is a view of a flat one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    points = DTensor.from_local(torch.randn(5, 3), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"key is a DTensor; pass the points of this rank, key.to_local\(\)"):
        distributed.fit(points, points)
    fully_shard(intention.nn.Intention(intention.nn.LearnableAlpha(0.5)), mesh=mesh)  # FSDP2 refuses scalars

    def wrap(model):
        for part in (getattr(model, name, None) for name in ("enter", "layer", "mixer", "head")):
            if part is not None:
                fully_shard(part, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    check_training(wrap)


def check_replicated_queries_under_ddp():
    """The same queries and loss everywhere: DDP averages, which is right as it is, without `replicated_query`."""
    (query, key, value, target), *_ = batches()
    one, model = model_of(Split), nn.parallel.DistributedDataParallel(model_of(Split))
    one.call = F.intention
    (one(query, key, value) - target).square().mean().backward()
    part = [x.chunk(2, 1)[dist.get_rank()] for x in (key, value)]
    (model(query, *part) - target).square().mean().backward()
    for (name, x), y in zip(one.named_parameters(), model.parameters(), strict=True):
        assert x.grad.norm() > 0.0, name
        close(y.grad, x.grad, 1e-5)


# -- starting ranks ----------------------------------------------------------------------------------------------------

# those whose arithmetic the number of ranks enters, and the rest
ANY_NUMBER = (
    check_values_and_gradients,
    check_far_from_the_origin,
    check_second_derivatives,
    check_a_rank_whose_weights_are_zero,
    check_one_rank_wants_a_gradient,
    check_noise,
    check_groups,
    check_errors_on_all_ranks,
)
TWO_RANKS = (
    check_float32,
    check_log_weights,
    check_alpha_zero,
    check_leading_dimensions,
    check_what_is_sent,
    check_chunks,
    check_half_precision_and_autocast,
    check_contexts,
    check_warnings,
    check_not_a_number,
    check_errors_of_intention,
    check_distributed_data_parallel,
    check_fully_sharded,
    check_replicated_queries_under_ddp,
)
CHECKS = {check.__name__: check for check in (*ANY_NUMBER, *TWO_RANKS)}


def started(world, folder, *names):
    """Run checks on `world` processes; what went wrong, or nothing."""
    command = [sys.executable, __file__, str(folder), *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes) for rank in range(world)]
    try:
        told = [rank.communicate(timeout=120)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    problems = [path.read_text() for path in sorted(folder.glob("*.txt"), key=os.path.getmtime)]
    for rank in range(world):
        done = folder / f"{rank}.done"
        if not problems and not (done.exists() and done.read_text().split() == list(names)):
            problems.append(f"rank {rank} did not end:\n{told[rank]}")
    return "\n".join(problems)


def main(folder, *names):
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    for name in names:
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for category in (DeprecationWarning, FutureWarning):  # torch's own, as in pyproject.toml
                warnings.filterwarnings("ignore", category=category, module="torch.*")
            try:
                CHECKS[name]()
                dist.barrier()
            except BaseException:  # pytest's own is no Exception
                # leaving is what the others notice: they would wait for this rank in the next all-reduce
                (Path(folder) / f"{rank}.txt").write_text(f"rank {rank}, {name}:\n{traceback.format_exc()}")
                os._exit(1)
    (Path(folder) / f"{rank}.done").write_text(" ".join(names))
    dist.destroy_process_group()


@pytest.mark.parametrize(("world", "checks"), [(2, ANY_NUMBER + TWO_RANKS), (4, ANY_NUMBER)], ids=["two", "four"])
def test_a_context_over_ranks(world, checks, tmp_path):
    problems = started(world, tmp_path, *(check.__name__ for check in checks))
    assert not problems, problems


def test_without_process_group():
    x = torch.randn(5, 3)
    for call in (lambda: distributed.fit(x, x), lambda: distributed.intention(x, x, x)):
        with pytest.raises(RuntimeError, match=r"no process group; start with torchrun .* or use intention.fit"):
            call()


def test_the_script_of_the_docs():
    script = ROOT / "examples" / "distributed_fit.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("error") == 1, done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
