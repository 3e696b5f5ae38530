"""Points that come and go, contexts that are joined, and contexts that are stored."""

import json
import sys

import pytest
import torch

import intention
from intention.context.points import Sums

D = torch.float64
OPTIONS = {
    "ridge": {},
    "intercept": {"intercept": True},
    "convex": {"covariance": "convex"},
    "within": {"covariance": "within"},
    "within, intercept": {"covariance": "within", "intercept": True},
    "gaussian": {"kernel": intention.kernels.Gaussian(0.4), "intercept": True},
    "sums": {"keep_points": False, "intercept": True},
    "nystroem": {"features": "nystroem"},
}
SHAPES = [(2, 23, 3, 5), (2, 7, 13, 2)]


def sample(b, n, d, k, name, dtype=D):
    key, query = torch.randn(b, n, d, dtype=dtype) + 1, torch.randn(b, 11, d, dtype=dtype)
    value = torch.randn(b, n, k, dtype=dtype) - 2
    if "within" in name:
        value = torch.nn.functional.one_hot(torch.arange(n) % k, k).to(dtype).expand(b, n, k)
    return key, value, query


def options(name, key):
    chosen = dict(OPTIONS[name])
    if chosen.get("features") == "nystroem":
        chosen["features"] = intention.features.nystroem(intention.kernels.Gaussian(0.4), key, landmarks=5)
    return chosen | {"alpha": 0.3}


def same(a, b, query, tol=1e-10):
    got, want = a(query), b(query)
    assert (got - want).norm() <= tol * want.norm(), ((got - want).norm() / want.norm()).item()
    got, want = a.variance(query), b.variance(query)
    assert (got - want).norm() <= tol * want.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_add_and_remove_are_refits(shape, name, weighted):
    key, value, query = sample(*shape, name)
    chosen, n = options(name, key), shape[1]
    weight = torch.rand(shape[:2], dtype=D) + 0.1 if weighted else None

    def part(a, b):
        return key[:, a:b], value[:, a:b], None if weight is None else weight[:, a:b]

    def fitted(a, b):
        k, v, w = part(a, b)
        return intention.fit(k, v, weight=w, **chosen)

    grown = fitted(0, 4).add(*part(4, 5)).add(*part(5, n))
    same(grown, fitted(0, n), query)
    less = grown.remove(*part(0, 2)).remove(*part(n - 1, n))
    same(less, fitted(2, n - 1), query, 1e-8)
    same(less.add(*part(0, 2)).add(*part(n - 1, n)), fitted(0, n), query, 1e-8)


@pytest.mark.parametrize("name", ["ridge", "intercept"])
def test_nothing_is_left_when_all_points_go(name):
    key, value, query = sample(2, 23, 3, 5, name)
    for keep in (True, False):
        ctx = intention.fit(key, value, alpha=0.3, intercept=name == "intercept", keep_points=keep)
        ctx = ctx.add(key[:, :2], value[:, :2]).remove(key[:, :2], value[:, :2]).remove(key, value)
        assert ctx(query).abs().max() < 1e-10


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_merge_is_one_fit(shape, name):
    key, value, query = sample(*shape, name)
    chosen = options(name, key)
    a, b = (intention.fit(key[:, part], value[:, part], **chosen) for part in (slice(0, 3), slice(3, None)))
    same(a.merge(b), intention.fit(key, value, **chosen), query)
    same(b.merge(a), intention.fit(key, value, **chosen), query)
    lost = a.without_points().merge(b) if a.kernel is None else a.merge(b)
    same(lost, intention.fit(key, value, **chosen), query)


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_64_parts_in_float32_are_one_fit(offset):
    torch.manual_seed(5)
    key, value, query = torch.randn(64 * 40, 9) + offset, torch.randn(64 * 40, 3), torch.randn(11, 9) + offset
    for keep in (True, False):
        whole = intention.fit(key, value, alpha=0.1, intercept=True, keep_points=keep)
        parts = [
            intention.fit(k, v, alpha=0.1, intercept=True, keep_points=keep)
            for k, v in zip(key.chunk(64), value.chunk(64), strict=True)
        ]
        while len(parts) > 1:
            parts = [a.merge(b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
        want = intention.fit(key.double(), value.double(), alpha=0.1, intercept=True)(query.double())
        for ctx in (whole, parts[0]):
            assert ((ctx(query) - want).norm() / want.norm()) < 1e-6
        assert ((parts[0].w - whole.w).norm() / whole.w.norm()) < 1e-6


@pytest.mark.parametrize("keep", [True, False])
def test_10000_updates_in_float32_do_not_drift(keep):
    torch.manual_seed(7)
    n, d, k = 40, 6, 2
    key, value, query = torch.randn(n, d) + 3, torch.randn(n, k), torch.randn(11, d) + 3
    ctx = intention.fit(key, value, alpha=1e-2, intercept=True, keep_points=keep)
    for step in range(5000):  # one added, the oldest removed: a window that slides
        new_key, new_value = torch.randn(1, d) * (10 if step % 50 == 0 else 1) + 3, torch.randn(1, k)
        ctx = ctx.add(new_key, new_value).remove(key[:1], value[:1])
        key, value = torch.cat([key[1:], new_key]), torch.cat([value[1:], new_value])
    refit = intention.fit(key, value, alpha=1e-2, intercept=True)
    assert (ctx(query) - refit(query)).norm() < 1e-4 * refit(query).norm()
    drift = (ctx.free_w() - refit.free_w()).norm() / refit.free_w().norm()
    assert drift < 1e-10  # in float64 inside


def test_forget_is_a_smaller_weight():
    key, value, query = sample(2, 23, 3, 5, "ridge")
    for chosen in ({}, {"keep_points": False}, {"kernel": intention.kernels.Gaussian(0.4)}):
        ctx = intention.fit(key, value, alpha=0.3, intercept=True, **chosen)
        new = torch.randn(2, 4, 3, dtype=D), torch.randn(2, 4, 5, dtype=D)
        got = ctx.forget(0.5).add(*new).forget(torch.tensor([0.9, 0.8], dtype=D))
        weight = torch.cat([torch.full((2, 23), 0.5, dtype=D), torch.ones(2, 4, dtype=D)], -1)
        weight = weight * torch.tensor([[0.9], [0.8]], dtype=D)
        points = torch.cat([key, new[0]], -2), torch.cat([value, new[1]], -2)
        same(got, intention.fit(*points, alpha=0.3, weight=weight, intercept=True, **chosen), query)
    for gamma in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match=r"gamma must be in \(0, 1\]"):
            ctx.forget(gamma)


def test_updates_are_differentiable():
    key, value, query = (x.requires_grad_() for x in sample(2, 7, 3, 2, "ridge"))
    gamma = torch.tensor(0.7, dtype=D, requires_grad=True)

    def use(key, value, query, gamma):
        ctx = intention.fit(key[:, :4], value[:, :4], alpha=0.3, intercept=True, keep_points=False)
        other = intention.fit(key[:, 4:6], value[:, 4:6], alpha=0.3, intercept=True, keep_points=False)
        ctx = ctx.forget(gamma).merge(other).add(key[:, 6:], value[:, 6:]).remove(key[:, 5:6], value[:, 5:6])
        return ctx(query), ctx.variance(query)

    assert torch.autograd.gradcheck(use, (key, value, query, gamma))


def test_the_scatter_is_exact_far_from_zero():
    torch.manual_seed(0)
    key, value = torch.randn(1000, 3, dtype=D), torch.randn(1000, 2, dtype=D)
    near, far = (Sums.of(key[:300] + c, value[:300]).merge(Sums.of(key[300:] + c, value[300:])) for c in (0.0, 1e6))
    assert (near.scatter - far.scatter).norm() < 1e-9 * near.scatter.norm()
    assert (near.cross - far.cross).norm() < 1e-8 * near.cross.norm()


def test_removing_what_is_not_there():
    key, value, _ = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value, intercept=True)
    with pytest.raises(ValueError, match="point 0 of those to remove is not in the context"):
        ctx.remove(key[:, :1] + 1e-9, value[:, :1])
    with pytest.raises(ValueError, match="point 1"):  # once, not twice
        ctx.remove(key[:, [3, 3]], value[:, [3, 3]])
    with pytest.raises(ValueError, match="and weight"):
        ctx.remove(key[:, :1], value[:, :1], weight=torch.full((2, 1), 0.5, dtype=D))
    sums = ctx.without_points()
    with pytest.raises(ValueError, match="negative direction"):
        sums.remove(key[:, :1] + 100, value[:, :1])
    with pytest.raises(ValueError, match="negative direction"):
        sums.remove(torch.cat([key, key], -2), torch.cat([value, value], -2))
    sums.remove(key[:, :1], value[:, :1])


def test_a_batch_element_removes_its_own_points():
    key, value, query = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value, alpha=0.3)
    at = torch.tensor([[3, 20], [7, 1]])
    gone = [x.gather(-2, at.unsqueeze(-1).expand(2, 2, x.shape[-1])) for x in (key, value)]
    left = torch.tensor([[i for i in range(23) if i not in row] for row in at.tolist()])
    stay = [x.gather(-2, left.unsqueeze(-1).expand(2, 21, x.shape[-1])) for x in (key, value)]
    same(ctx.remove(*gone), intention.fit(*stay, alpha=0.3), query)


def test_contexts_that_cannot_be_merged():
    key, value, _ = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value, alpha=0.3)
    different = {
        "alpha": {"alpha": 0.4},
        "covariance": {"alpha": 0.3, "covariance": "convex"},
        "intercept": {"alpha": 0.3, "intercept": True},
        "kernel": {"alpha": 0.3, "kernel": "gaussian"},
        "features": {"alpha": 0.3, "kernel": "gaussian", "features": "fourier", "landmarks": 7},
    }
    for name, chosen in different.items():
        with pytest.raises(ValueError, match=f"different {name}"):
            ctx.merge(intention.fit(key, value, **chosen))
    with pytest.raises(TypeError, match="merge takes another Context, got Tensor"):
        ctx.merge(key)
    for k, v in ((key[..., :1], value), (key, value[..., :1])):
        for keep in (True, False):
            with pytest.raises(ValueError, match=r"different \(d, k\)"):
                ctx.merge(intention.fit(k, v, alpha=0.3, keep_points=keep))
    first = intention.fit(key, value, kernel="gaussian")
    with pytest.raises(ValueError, match=r"kernel=first\.kernel"):
        first.merge(intention.fit(2 * key, value, kernel="gaussian"))  # another median, another gamma
    first.merge(intention.fit(2 * key, value, kernel=first.kernel))


def test_what_sums_and_callables_cannot_do():
    key, value, query = sample(2, 23, 3, 5, "ridge")
    sums = intention.fit(key, value, keep_points=False)
    for what in ("leave_one_out", "leverage"):
        with pytest.raises(ValueError, match=f"{what} needs the points"):
            getattr(sums, what)()
    with pytest.raises(ValueError, match="keep_points=False cannot be"):
        intention.fit(key, value, kernel="gaussian", keep_points=False)
    own = intention.fit(key, value, covariance=lambda k, v, w: k.mT @ k)
    for what in (lambda c: c.add(key, value), lambda c: c.remove(key, value), lambda c: c.merge(c)):
        with pytest.raises(ValueError, match="callable covariance"):
            what(own)
    with pytest.raises(ValueError, match="got a callable"):
        own.leave_one_out()
    with pytest.raises(ValueError, match="a kernel has no such d"):
        intention.fit(key, value, covariance=lambda k, v, w: k.mT @ k, kernel="gaussian")
    assert own(query).shape == (2, 11, 5)
    with pytest.raises(ValueError, match="has no w in the space of the keys"):
        intention.fit(key, value, kernel="gaussian").w  # noqa: B018


@pytest.mark.parametrize("name", [*OPTIONS, "constrained", "loo", "fourier"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stored_context_gives_the_same_bits(name, dtype, tmp_path):
    key, value, query = sample(2, 23, 3, 5, name, dtype)
    if name == "loo":
        ctx = intention.fit(key, value, alpha="loo", intercept=True)
    elif name == "fourier":
        ctx = intention.fit(key, value, kernel="laplacian", features="fourier", landmarks=7, keep_points=False)
    elif name == "constrained":
        ctx = intention.fit(key, value, intercept=True).constrain(torch.eye(3), 0.0)
    else:
        ctx = intention.fit(key, value, weight=torch.rand(2, 23), **options(name, key))
        ctx = ctx.add(key[:, :2] + 1, value[:, :2])
    ctx.save(tmp_path / "ctx.safetensors")
    loaded = intention.Context.load(tmp_path / "ctx.safetensors")
    assert torch.equal(loaded(query), ctx(query))
    assert loaded(query).dtype == ctx(query).dtype == dtype
    if name != "constrained":
        assert torch.equal(loaded.variance(query), ctx.variance(query))
        more = key[:, :1] + 2, value[:, :1]
        assert torch.equal(loaded.add(*more)(query), ctx.add(*more)(query))
    if ctx.key is not None and ctx.covariance != "within" and name != "constrained":
        assert torch.equal(loaded.leave_one_out(), ctx.leave_one_out())
    assert torch.equal(intention.Context.from_state_dict(ctx.state_dict())(query), ctx(query))


def test_files_that_are_no_context(tmp_path):
    key, value, _ = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value)
    ctx.save(tmp_path / "whole")
    data = (tmp_path / "whole").read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        intention.Context.load(tmp_path / "cut")
    with pytest.raises(FileNotFoundError):
        intention.Context.load(tmp_path / "none")
    with pytest.raises(ValueError, match="no readable 'meta'"):
        intention.Context.from_state_dict({"weight": torch.ones(3)})
    state = ctx.state_dict()
    del state["alpha"]
    with pytest.raises(ValueError, match="not the whole state"):
        intention.Context.from_state_dict(state)
    state = ctx.state_dict()
    meta = json.loads(bytes(state["meta"].tolist())) | {"format": 99}
    state["meta"] = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="format 99, this version reads 1"):
        intention.Context.from_state_dict(state)
    for chosen, reason in (
        ({"covariance": lambda k, v, w: k.mT @ k}, "callable covariance cannot be stored"),
        ({"kernel": lambda x, y: x @ y.mT}, "cannot be stored"),
        ({"features": lambda x: x.square()}, "callable features cannot be stored"),
    ):
        with pytest.raises(ValueError, match=reason):
            intention.fit(key, value, **chosen).save(tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_errors_name_what_came_and_the_remedy():
    key, value, _ = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value)
    for call, kind, reason in [
        (lambda: intention.fit(key, value[:, :5]), ValueError, "same number of points N"),
        (lambda: intention.fit(key, value, alpha=-1), ValueError, "alpha must be finite and >= 0, got -1"),
        (lambda: intention.fit(key, value, alpha=torch.tensor(-1.0)), ValueError, "alpha must be finite and >= 0"),
        (lambda: intention.fit(key, value, alpha="cv"), ValueError, "alpha must be one of"),
        (lambda: intention.fit(key, value, alpha=[]), ValueError, "empty grid"),
        (lambda: intention.fit(key, value, alpha=[1.0, -2.0]), ValueError, "got -2"),
        (lambda: intention.fit(key, value, alpha=1.5, covariance="convex"), ValueError, r"in \[0, 1\]"),
        (lambda: intention.fit(key, value, covariance="total"), ValueError, "covariance must be one of"),
        (lambda: intention.fit(key, value, covariance="within"), ValueError, "one-hot"),
        (lambda: intention.fit(key, value, weight=torch.ones(2, 22)), ValueError, "N = 23"),
        (lambda: intention.fit(key, value, weight=-torch.ones(2, 23))(key), ValueError, "weight must be >= 0"),
        (lambda: intention.fit(key, value, kernel="rbf"), ValueError, "kernel must be one of"),
        (lambda: intention.fit(key, value, features="nystroem"), ValueError, "needs a kernel and landmarks"),
        (lambda: intention.fit(key, value, landmarks=5), ValueError, "belongs to features="),
        (lambda: intention.fit(key, value, covariance=lambda k, v, w: k).w, ValueError, r"must return \(..., d, d\)"),
        (lambda: ctx(key[..., :2]), ValueError, "d = 3 features"),
        (lambda: ctx("query"), TypeError, "query must be a torch.Tensor, got str"),
        (lambda: ctx.add(key[..., :2], value), ValueError, "d = 3 features and k = 5 values"),
        (lambda: ctx.without_points().add(key, value[..., :2]), ValueError, "k = 5 values"),
    ]:
        with pytest.raises(kind, match=reason):
            call()


def test_safetensors_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install safetensors"):
        intention.fit(torch.randn(5, 2), torch.randn(5, 1)).save(tmp_path / "ctx")


@pytest.mark.parametrize("how", ["add", "merge", "sums"])
@pytest.mark.parametrize("intercept", [False, True])
def test_points_that_count_nothing_have_the_slope_of_a_refit(how, intercept):
    """All added weights are 0, where a weighted mean is 0 / 0."""
    key, value, query = (x[0] for x in sample(1, 23, 3, 5, "ridge"))
    other, also, _ = (x[0] for x in sample(1, 7, 3, 5, "ridge"))
    options = {"alpha": 0.3, "intercept": intercept}

    def updated(weight):
        if how == "merge":
            return intention.fit(key, value, **options).merge(intention.fit(other, also, weight=weight, **options))(
                query
            )
        return intention.fit(key, value, **options, keep_points=how == "add").add(other, also, weight)(query)

    def fitted(weight):
        weight = torch.cat([torch.ones(23, dtype=D), weight])
        return intention.fit(torch.cat([key, other]), torch.cat([value, also]), weight=weight, **options)(query)

    for weight in (torch.zeros(7, dtype=D), torch.rand(7, dtype=D)):
        got, want = (torch.autograd.functional.jacobian(f, weight) for f in (updated, fitted))
        torch.testing.assert_close(updated(weight), fitted(weight))
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n", [7, 23])
@pytest.mark.parametrize("kernel", [None, "gaussian"])
def test_a_class_of_one_point_that_counts_nothing(n, kernel):
    """It is the mean of its class whatever its weight, so Sigma does not change with that."""
    key, query = torch.randn(n, 11, dtype=D) + 1, torch.randn(5, 11, dtype=D)
    value = torch.nn.functional.one_hot(torch.cat([torch.arange(n - 1) % 2, torch.tensor([2])]), 3).to(D)

    def answer(last):
        weight = torch.cat([torch.ones(n - 1, dtype=D), last])
        return intention.fit(key, value, 0.3, weight, covariance="within", kernel=kernel)(query)

    zero = torch.zeros(1, dtype=D)
    slope = torch.autograd.functional.jacobian(answer, zero)
    step = 1e-4
    ahead = (4 * answer(zero + step) - answer(zero + 2 * step) - 3 * answer(zero)) / (2 * step)
    torch.testing.assert_close(slope.squeeze(-1), ahead, rtol=1e-4, atol=1e-6)


def test_what_is_handed_out_is_a_copy():
    key, value, query = sample(2, 23, 3, 5, "ridge")
    ctx = intention.fit(key, value, 0.3, intercept=True)
    before = ctx(query)
    for x in (ctx.w, ctx.intercept, ctx.free_w(), ctx.leverage(), ctx.leave_one_out(), ctx.describe().error):
        x.zero_()
    assert torch.equal(ctx(query), before)
    assert (ctx.describe().error > 0).all()


@pytest.mark.parametrize("name", ["ridge", "sums", "gaussian"])
def test_removing_no_points_changes_nothing(name):
    key, value, query = sample(2, 7, 3, 2, name)
    ctx = intention.fit(key, value, **options(name, key))
    same(ctx.remove(key[..., :0, :], value[..., :0, :]), ctx, query)


@pytest.mark.parametrize("keep_points", [True, False])
def test_weights_of_another_batch_are_named(keep_points):
    ctx = intention.fit(torch.randn(2, 7, 3), torch.randn(2, 7, 1), alpha=1.0, keep_points=keep_points)
    for change in (ctx.add, ctx.remove):
        with pytest.raises(ValueError, match=r"context \(2,\).*weight \(5,\)"):
            change(torch.randn(2, 5, 3), torch.randn(2, 5, 1), torch.rand(5, 5))
