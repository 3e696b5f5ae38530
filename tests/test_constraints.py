"""Constraints on w: optimal against scipy, differentiable, infeasible ones refused, the paper's formula compared."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, nnls

import intention
from intention.constraints import LinearConstraint, one_pass

D = torch.float64


def problems(b, n, d, p, k, seed, equalities=0, slack=True):
    """Feasible by construction: a point w0 satisfies every constraint, some of them with equality."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=D)

    key, value, c = normal(b, n, d), 2 * normal(b, n, k), normal(b, d, p)
    gap = (torch.rand(b, p, k, generator=gen, dtype=D) - 0.3).clamp_min(0)
    gap[:, :equalities] = 0
    bound = c.mT @ normal(b, d, k) - gap
    return key, value, c, bound


def solve_by_scipy(sigma, w, c, bound, equal):
    """min (x - w)' sigma (x - w) with C'x >= c, by Lawson and Hanson's nonnegative least squares on the dual.

    mu >= 0 minimises |L^-1 C mu - r|^2 up to a constant, with equalities as two inequalities.
    """
    both = np.concatenate([c, -c[:, equal]], 1), np.concatenate([bound, -bound[equal]])
    lower = np.linalg.cholesky(sigma)
    y = np.linalg.solve(lower, both[0])  # minimise |Y mu|^2 / 2 - gap'mu
    gap = both[1] - both[0].T @ w
    # Lawson & Hanson, least distance programming: with E = [Y; gap'], f = e_last, the residual gives the step
    e, f = np.vstack([y, gap]), np.zeros(len(y) + 1)
    f[-1] = 1
    u, _ = nnls(e, f, maxiter=1000)
    r = e @ u - f
    return w + np.linalg.solve(lower.T, -r[:-1] / r[-1])


@pytest.mark.parametrize("p", range(1, 9))
def test_inequalities_are_optimal(p):
    """8 x 250 = 2,000 problems: the objective and w of scipy, to 1e-6."""
    d = 3 + p % 5
    key, value, c, bound = problems(50, 11, d, p, 5, seed=p)
    alpha = 0.2
    ctx = intention.fit(key, value, alpha=alpha)
    got, free = ctx.constrain(c, bound).w, ctx.w
    checked = binding = 0
    for i in range(50):
        sigma = (key[i].mT @ key[i] + alpha * torch.eye(d, dtype=D)).numpy()
        for j in range(5):
            w, x = free[i, :, j].numpy(), got[i, :, j].numpy()
            want = solve_by_scipy(sigma, w, c[i].numpy(), bound[i, :, j].numpy(), np.zeros(p, bool))
            size = 1 + np.linalg.norm(want)
            assert (c[i].numpy().T @ x - bound[i, :, j].numpy()).min() > -1e-6 * size
            best = (want - w) @ sigma @ (want - w)
            assert (x - w) @ sigma @ (x - w) <= best * (1 + 1e-6) + 1e-9
            assert np.linalg.norm(x - want) < 1e-6 * size
            checked, binding = checked + 1, binding + (best > 1e-9)
    assert checked == 250
    assert binding > 100


def test_scipy_agrees_with_itself():
    """The oracle above against another of scipy's solvers, on a few problems."""
    key, value, c, bound = problems(1, 11, 4, 5, 6, seed=3)
    sigma = (key[0].mT @ key[0] + 0.2 * torch.eye(4, dtype=D)).numpy()
    free = intention.fit(key, value, alpha=0.2).w[0].numpy()
    for j in range(6):
        w, normal, level = free[:, j], c[0].numpy(), bound[0, :, j].numpy()
        ours = solve_by_scipy(sigma, w, normal, level, np.zeros(5, bool))
        theirs = minimize(
            lambda x, w=w: (x - w) @ sigma @ (x - w),
            np.zeros(4),
            jac=lambda x, w=w: 2 * sigma @ (x - w),
            constraints={
                "type": "ineq",
                "fun": lambda x, a=normal, b=level: a.T @ x - b,
                "jac": lambda x, a=normal: a.T,
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 500},
        )
        assert np.linalg.norm(theirs.x - ours) < 1e-5


@pytest.mark.parametrize("shape", [(17, 5), (4, 9)])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_equalities_and_inequalities_together(shape, intercept, covariance):
    n, d = shape
    key, value, c, bound = problems(3, n, d, 4, 2, seed=11, equalities=2)
    ctx = intention.fit(key, value, alpha=0.3, intercept=intercept, covariance=covariance)
    got = ctx.constrain(c[..., :2], bound[:, :2], kind="eq").constrain(c[..., 2:], bound[:, 2:])
    x = key - key.mean(-2, keepdim=True) if intercept else key
    gain = 0.7 if covariance == "convex" else 1.0
    sigma = gain * x.mT @ x + 0.3 * torch.eye(d, dtype=D)
    for i in range(3):
        for j in range(2):
            want = solve_by_scipy(
                sigma[i].numpy(), ctx.w[i, :, j].numpy(), c[i].numpy(), bound[i, :, j].numpy(), np.arange(4) < 2
            )
            assert np.linalg.norm(got.w[i, :, j].numpy() - want) < 1e-6 * (1 + np.linalg.norm(want))
    assert ((c.mT @ got.w - bound)[:, :2]).abs().max() < 1e-8
    query = torch.randn(3, 7, d, dtype=D)
    assert torch.allclose(got(query), query @ got.w + got.intercept.unsqueeze(-2))
    if intercept:  # the mean of the fitted values is still the mean of the values
        assert torch.allclose(got(key).mean(-2), value.mean(-2))


def test_planes_that_sigma_makes_nearly_parallel_still_meet_exactly():
    """Two lines in the plane meet in one point whatever Sigma is, though its geometry shrinks their angle a lot."""
    gen = torch.Generator().manual_seed(0)
    key, value = torch.randn(50, 9, 2, generator=gen, dtype=D), torch.randn(50, 9, 1, generator=gen, dtype=D)
    key = key @ torch.tensor([[1.0, 1.0], [1e-3, -1e-3]], dtype=D)  # Sigma has a condition of about 1e6
    first = torch.randn(50, 2, generator=gen, dtype=D)
    c = torch.stack([first, first + 0.02 * first.flip(-1) * torch.tensor([1.0, -1.0])], -1)
    bound = torch.randn(50, 2, 1, generator=gen, dtype=D)
    got, want = intention.fit(key, value, alpha=0).constrain(c, bound, kind="eq").w, torch.linalg.solve(c.mT, bound)
    assert ((key @ (got - want)).norm(dim=(1, 2)) / (key @ want).norm(dim=(1, 2))).max() < 1e-9


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
def test_gradients_flow_through_the_active_set(shape):
    n, d = shape
    key, value, c, bound = problems(2, n, d, 3, 2, seed=5)
    weight = (torch.rand(2, n, dtype=D) + 0.3).requires_grad_()
    alpha = torch.tensor(0.4, dtype=D, requires_grad=True)

    def w(key, value, c, bound, weight, alpha):
        return intention.fit(key, value, alpha, weight, intercept=True).constrain(c, bound).w

    args = (key.requires_grad_(), value.requires_grad_(), c.requires_grad_(), bound.requires_grad_(), weight, alpha)
    free = intention.fit(key, value, alpha, weight, intercept=True).w
    assert ((c.mT @ free < bound).sum() > 2).item()  # some are active
    assert torch.autograd.gradcheck(w, args)


def test_constraints_that_already_hold_change_nothing():
    key, value, c, _ = problems(2, 11, 4, 3, 2, seed=7)
    ctx = intention.fit(key, value)
    loose = c.mT @ ctx.w - 1
    assert torch.equal(ctx.constrain(c, loose).w, ctx.w)


def test_the_papers_one_pass_is_right_for_one_constraint_and_wrong_for_several():
    """Section "Variants": w* - Z C(C'ZC)^-1(C'w* - c) over the violated constraints."""
    optimal, feasible = {}, {}
    for p in (1, 2, 5):
        key, value, c, bound = problems(400, 11, 6, p, 1, seed=20 + p)
        ctx = intention.fit(key, value, alpha=0.2)
        once, exact = one_pass(ctx, c, bound), ctx.constrain(c, bound).w
        moved = ((exact - ctx.w).norm(dim=(-2, -1)) > 1e-9) | ((once - ctx.w).norm(dim=(-2, -1)) > 1e-9)
        same = (once - exact).norm(dim=(-2, -1)) < 1e-7 * (1 + exact.norm(dim=(-2, -1)))
        optimal[p] = same[moved].double().mean().item()
        feasible[p] = ((c.mT @ once - bound).amin((-2, -1)) > -1e-7)[moved].double().mean().item()
    assert optimal[1] == 1
    assert 0.4 < optimal[2] < 0.95
    assert optimal[5] < 0.6
    assert feasible[5] < 0.9
    key, value, c, bound = problems(20, 11, 6, 3, 2, seed=1, equalities=3)
    ctx = intention.fit(key, value, alpha=0.2)
    assert torch.allclose(one_pass(ctx, c, bound, "eq"), ctx.constrain(c, bound, "eq").w)  # equalities: exact


def test_what_cannot_be():
    key, value, c, bound = problems(3, 11, 4, 2, 2, seed=2)
    ctx = intention.fit(key, value)
    one = torch.eye(4, dtype=D)[:, :1]
    with pytest.raises(ValueError, match=r"contradict each other in 6 of 6 problems.*no w satisfies"):
        ctx.constrain(torch.cat([one, -one], -1), torch.tensor([1.0, 0.0])).w  # noqa: B018 - w_1 >= 1, w_1 <= 0
    with pytest.raises(ValueError, match="contradict each other"):
        ctx.constrain(one, 0.0, "eq").constrain(one, 1.0)(key)
    with pytest.raises(ValueError, match="C must have d = 4 rows"):
        ctx.constrain(c.mT, bound)
    with pytest.raises(ValueError, match=r"c must be a number, a tensor \(p,\)"):
        ctx.constrain(c, torch.zeros(3))
    with pytest.raises(ValueError, match="kind must be one of"):
        ctx.constrain(c, bound, "le")
    with pytest.raises(ValueError, match="constrain belongs to weights w"):
        intention.fit(key, value, kernel="gaussian").constrain(c, bound)
    with pytest.raises(ValueError, match="use alpha > 0"):
        intention.fit(key[:, :2], value[:, :2], alpha=0).constrain(c, bound).w  # noqa: B018
    for what in ("leave_one_out", "leverage"):
        with pytest.raises(ValueError, match=f"{what} is not known in closed form under constraints"):
            getattr(ctx.constrain(c, bound), what)()
    with pytest.raises(ValueError, match="then constrain"):
        ctx.constrain(c, bound).merge(ctx)


def test_updates_keep_the_constraints():
    key, value, c, bound = problems(2, 11, 4, 2, 3, seed=4)
    ctx = intention.fit(key[:, :6], value[:, :6]).constrain(c, bound)
    want = intention.fit(key, value).constrain(c, bound)
    assert torch.allclose(ctx.add(key[:, 6:], value[:, 6:]).w, want.w)


def test_a_head_trains_through_its_constraints():
    """Weights that must not be negative: an embedding and the bound itself learn through the active set."""
    torch.manual_seed(0)
    truth = torch.tensor([[1.0, 0.5, 0.0]]).mT
    embed = torch.nn.Linear(3, 3, bias=False)
    bound = torch.nn.Parameter(torch.full((3,), 0.3))
    head = intention.nn.Intention(alpha=0.1, constraints=LinearConstraint(torch.eye(3), bound))
    assert "constraints.0.bound" in dict(head.named_parameters())
    assert "constraints.0.normal" in dict(head.named_buffers())
    model = torch.nn.ModuleList([embed, head])
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    losses, active = [], 0
    for _ in range(200):
        key, query = torch.randn(16, 11, 3), torch.randn(16, 7, 3)
        optimiser.zero_grad()
        loss = (head(embed(query), embed(key), key @ truth) - query @ truth).square().mean()
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        active += int(bound.grad.abs().sum() > 0)
        optimiser.step()
        losses.append(loss.item())
        with torch.no_grad():
            context = head.fit(embed(key), key @ truth)
            assert (context.w >= bound.unsqueeze(-1) - 1e-5).all()
    assert active > 10  # the bound was learnt from
    assert sum(losses[-20:]) < 0.1 * sum(losses[:20])


def test_a_head_without_constraints_is_the_functional_call():
    query, key, value = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    head = intention.nn.Intention(alpha=intention.nn.LearnableAlpha(0.3), intercept=True)
    want = intention.functional.intention(query, key, value, alpha=head.alpha(), intercept=True)
    assert torch.equal(head(query, key, value), want)
    head(query, key, value).sum().backward()
    assert head.alpha.theta.grad is not None
    kernel = intention.nn.Intention(alpha=0.3, kernel=intention.kernels.Gaussian(learnable=True))
    kernel(query, key, value).sum().backward()
    assert kernel.kernel.log_gamma.grad.abs() > 0


@pytest.mark.parametrize("lead", [((), ()), ((2, 3), (2, 3)), ((), (4,)), ((5, 1), (3,)), ((2, 1, 3), (2, 4, 1))])
@pytest.mark.parametrize("shape", [(11, 4), (3, 7)])
def test_leading_dimensions_of_constraints(lead, shape):
    n, d = shape
    key, value = torch.randn(*lead[0], n, d, dtype=D), torch.randn(*lead[1], n, 2, dtype=D)
    c, bound = torch.randn(d, 2, dtype=D), torch.rand(2, dtype=D)
    got = intention.fit(key, value, alpha=0.3).constrain(c, bound).w
    whole = torch.broadcast_shapes(*lead)
    assert got.shape == (*whole, d, 2)
    keys, values = key.expand(*whole, n, d).reshape(-1, n, d), value.expand(*whole, n, 2).reshape(-1, n, 2)
    for i, w in enumerate(got.reshape(-1, d, 2)):
        assert torch.allclose(w, intention.fit(keys[i], values[i], alpha=0.3).constrain(c, bound).w)
