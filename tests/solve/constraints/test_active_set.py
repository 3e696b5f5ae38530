"""The batched active-set method against enumeration of all active sets, least distance programming, and its KKT."""

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch

from intention.solve.constraints.active_set import active_set
from intention.solve.constraints.constrained import on_planes

KINDS = ("ge", "eq", "mixed")


def conditioned(rng, d, condition):
    """A random Sigma with this condition number and a scale of its own."""
    q = np.linalg.qr(rng.standard_normal((d, d)))[0]
    return (q * condition ** -np.linspace(0, 1, d)) @ q.T * 10.0 ** rng.uniform(-2, 2)


def problem(rng, d, p, kind, slabs=True):
    """Sigma, w*, C, c and the equalities: feasible, as w0 meets them all. Some rows are repeated, implied or tight."""
    sigma = conditioned(rng, d, 10.0 ** rng.choice([0, 1, 3, 6]))
    star, w0 = rng.standard_normal((2, d))
    normals = rng.standard_normal((p, d))
    slack = rng.exponential(size=p) * rng.integers(0, 2, p)  # zero slack: a vertex through w0
    equal = {"ge": np.zeros(p, bool), "eq": np.ones(p, bool), "mixed": rng.random(p) < 0.4}[kind]
    for j in range(1, p):
        match rng.integers(0, 8):
            case 0:  # the same row, perhaps looser, perhaps longer
                normals[j] = normals[rng.integers(0, j)] * 10.0 ** rng.uniform(-1, 1)
            case 1:  # a positive combination: implied
                normals[j] = rng.random(j) @ normals[:j]
            case 2 if slabs:  # the other side of the same slab
                normals[j] = -normals[rng.integers(0, j)]
    return sigma, star, normals.T, normals @ w0 - np.where(equal, 0, slack), equal


def planes(sigma, star, c_matrix, c):
    """The constraints as G x >= h for x = L'(w - w*), with unit rows, and L."""
    lower = np.linalg.cholesky(sigma)
    g = scipy.linalg.solve_triangular(lower, c_matrix, lower=True).T
    length = np.linalg.norm(g, axis=1)
    return g / length[:, None], (c - c_matrix.T @ star) / length, lower


def by_enumeration(sigma, star, c_matrix, c, equal):
    """w as the nearest of all feasible points that some subset of the constraints, held with equality, can produce.

    Slow and safe: the optimum is one of these points and no feasible point is nearer, whatever is dependent or tight.
    """
    g, h, lower = planes(sigma, star, c_matrix, c)
    free = np.flatnonzero(~equal)
    subsets = np.tile(equal, (2 ** len(free), 1))
    subsets[:, free] = np.arange(2 ** len(free))[:, None] >> np.arange(len(free)) & 1
    x = (np.linalg.pinv(subsets[:, :, None] * g, rcond=1e-9) @ (subsets * h)[:, :, None]).squeeze(-1)
    slack = x @ g.T - h
    distance = np.linalg.norm(x, axis=1)
    held = np.where(equal, -np.abs(slack), slack) >= -1e-10 * (np.abs(h) + distance[:, None])
    best = np.where(held.all(1), distance, np.inf).argmin()
    return star + scipy.linalg.solve_triangular(lower.T, x[best], lower=False)


def by_least_distance(sigma, star, c_matrix, c, equal):
    """w by Lawson and Hanson, chapter 23: equalities removed by a basis of their null space, then scipy's nnls.

    For many constraints. It needs a feasible set with an inside: a slab of no width is infeasible up to rounding.
    """
    g, h, lower = planes(sigma, star, c_matrix, c)
    x, basis = np.zeros(len(star)), np.eye(len(star))
    if equal.any():
        x = np.linalg.lstsq(g[equal], h[equal], rcond=1e-9)[0]
        basis = scipy.linalg.null_space(g[equal], rcond=1e-9)
    rest = ~equal & (np.linalg.norm(g @ basis, axis=1) > 1e-7)  # what depends on the equalities is only rounding now
    # min |y| subject to G y >= h: with r = [G'; h'] u - (0, ..., 0, 1), u >= 0 and |r| smallest, y = -r_y / r_h
    g, h = g[rest] @ basis, h[rest] - g[rest] @ x
    if (h > 0).any():
        last = np.append(np.zeros(basis.shape[1]), 1.0)
        e = np.vstack([g.T, h / h.max()])
        r = e @ scipy.optimize.nnls(e, last, maxiter=1000)[0] - last
        x = x - basis @ r[:-1] * h.max() / r[-1]
    return star + scipy.linalg.solve_triangular(lower.T, x, lower=False)


def dual(problems):
    """Stacked D, gap and equalities, and Sigma^-1 C to come back to w."""
    sigma, star, c_matrix, c, equal = (torch.tensor(np.stack(x)) for x in zip(*problems, strict=True))
    lower = torch.linalg.cholesky(sigma)
    y = torch.linalg.solve_triangular(lower, c_matrix, upper=False)
    back = torch.linalg.solve_triangular(lower.mT, y, upper=True)
    return y.mT @ y, c - (c_matrix.mT @ star.unsqueeze(-1)).squeeze(-1), equal, back


def solutions(problems, **options):
    """The active sets with the multipliers of their planes, and w. Those found must be what D and gap ask for."""
    d, gap, equal, back = dual(problems)
    found = active_set(d, gap, equal, **options)
    mu = found.multiplier.unsqueeze(-1)
    off = (d @ mu).squeeze(-1) - gap
    assert (off.abs() <= 1e-9 * ((d.abs() @ mu.abs()).squeeze(-1) + gap.abs()))[found.active].all()
    _, star, c_matrix, c, _ = (torch.tensor(np.stack(x)) for x in zip(*problems, strict=True))
    w, mu = on_planes(star.unsqueeze(-1), c_matrix, back, c.unsqueeze(-1), found.active.unsqueeze(-2))
    return found._replace(multiplier=mu.squeeze(-2)), w.squeeze(-1).numpy()


def kkt_error(one, active, mu, w):
    """The largest relative breach of the conditions of optimality."""
    sigma, star, c_matrix, c, equal = one
    # distances in the geometry of Sigma, relative to how far w* and w are from the planes
    y = np.linalg.norm(np.linalg.solve(np.linalg.cholesky(sigma), c_matrix), axis=0)
    slack, gap, mu = (c_matrix.T @ w - c) / y, (c - c_matrix.T @ star) / y, mu * y
    far = np.sqrt((w - star) @ sigma @ (w - star))
    breach = np.where(equal, np.abs(slack), np.maximum(-slack, 0)) / (np.abs(gap) + far + 1e-12)
    signs = np.where(equal, 0, np.maximum(-mu, 0)).max() / (np.abs(mu).max() + 1e-300)
    products = np.abs(mu * slack).max() / (np.abs(mu * gap).max() + 1e-300)
    stationary = np.linalg.norm(sigma @ (w - star) - c_matrix @ (mu / y)) / (np.abs(c_matrix) @ np.abs(mu / y) + 1e-300)
    assert not mu[~active].any()
    return max(breach.max(), signs, products, stationary.max())


def compare(problems, found, w, reference=by_enumeration):
    """Everything the method promises for feasible problems; the worst errors (KKT, objective, w)."""
    assert found.feasible.all()
    assert found.converged.all()
    worst = np.zeros(3)
    for i, one in enumerate(problems):
        sigma, star, *_ = one
        right = reference(*one)
        objective, best = ((x - star) @ sigma @ (x - star) / 2 for x in (w[i], right))
        apart = np.sqrt((w[i] - right) @ sigma @ (w[i] - right))
        errors = (
            kkt_error(one, found.active[i].numpy(), found.multiplier[i].numpy(), w[i]),
            abs(objective - best) / (best + 1e-12),
            apart / (np.sqrt(2 * best) + 1e-12),
        )
        worst = np.maximum(worst, errors)
    return worst


def nonsingular(problems, found):
    """The smallest eigenvalue of D_AA with a unit diagonal over the batch."""
    d, *_ = dual(problems)
    root = d.diagonal(0, -2, -1).sqrt()
    unit = d / root.unsqueeze(1) / root.unsqueeze(2)
    on = found.active.double()
    masked = unit * on.unsqueeze(1) * on.unsqueeze(2) + torch.diag_embed(1 - on)
    return float(torch.linalg.eigvalsh(masked).amin())


@pytest.mark.parametrize("d", range(1, 8))
def test_optimal_on_2000_random_problems(d):
    """36 problems of every size in one call: every one is solved, however early or late its neighbours finish."""
    rng = np.random.default_rng(d)
    for p in range(1, 9):
        problems = [problem(rng, d, p, KINDS[i % 3]) for i in range(36)]
        found, w = solutions(problems)
        assert (compare(problems, found, w) < 1e-6).all()
        assert nonsingular(problems, found) > 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_many_constraints(seed):
    rng = np.random.default_rng(seed)
    problems = [problem(rng, 30, 40, KINDS[2 * (i % 2)], slabs=False) for i in range(4)]
    found, w = solutions(problems)
    assert found.iterations > 10
    assert (compare(problems, found, w, by_least_distance) < 1e-6).all()


def test_infeasible_elements_are_flagged_and_the_others_solved():
    """Slabs the wrong way round, contradicting equalities and an empty row, beside problems that have a solution."""
    d = torch.tensor([[1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    cases = [  # c of w >= , -w >= , 0 w >= (w* = 0), equalities, feasible, w
        ([1, 0, -1], [0, 0, 0], False, None),  # w >= 1 and w <= 0
        ([1, -2, 0], [0, 0, 0], True, 1),
        ([1, -1, 0], [0, 0, 0], True, 1),  # one point
        ([1, -1, 0], [1, 1, 0], True, 1),  # the same equality twice
        ([1, -2, 0], [1, 1, 0], False, None),  # w = 1 and w = 2
        ([1, 0, 0], [1, 0, 0], False, None),  # w = 1 and w <= 0
        ([-1, -1, 1e-9], [0, 0, 0], False, None),  # 0 >= 1e-9
        ([-1, -1, -1], [0, 0, 1], False, None),  # 0 = -1
        ([-1, -1, 0], [0, 0, 1], True, 0),
        ([-1, 0.5, -1], [0, 0, 0], True, -0.5),
    ]
    gap = torch.tensor([x[0] for x in cases], dtype=torch.float64)
    found = active_set(d.expand(len(cases), 3, 3), gap, torch.tensor([x[1] for x in cases]).bool())
    assert found.feasible.tolist() == [x[2] for x in cases]
    assert found.converged.all()
    for i, (_, _, feasible, w) in enumerate(cases):
        if feasible:
            assert float(found.multiplier[i, 0] - found.multiplier[i, 1]) == pytest.approx(w, abs=1e-12)


@pytest.mark.parametrize(("d", "p"), [(1, 3), (3, 5), (5, 7), (4, 8)])
def test_infeasible_by_a_certificate_of_farkas(d, p):
    """C y = 0 with y > 0 and c'y > 0 proves that no w exists; the same rows with c'y < 0 have one."""
    rng = np.random.default_rng(d + p)
    problems, expected = [], []
    for i in range(60):
        sigma, star, c_matrix, c, equal = problem(rng, d, p, "ge")
        involved = min(p, d + 1)
        y = rng.random(involved) + 0.1
        c_matrix[:, involved - 1] = -c_matrix[:, : involved - 1] @ y[:-1] / y[-1]
        w0 = rng.standard_normal(d)
        c = c_matrix.T @ w0 - np.where(np.arange(p) < involved, 0, rng.random(p))
        c[:involved] += (1 if i % 2 else -1) * 10.0 ** rng.uniform(-5, 1) * rng.random(involved)
        problems.append((sigma, star, c_matrix, c, equal))
        expected.append(i % 2 == 0)
    found, w = solutions(problems)
    assert found.feasible.tolist() == expected
    assert found.converged.all()
    solved = torch.tensor(expected)
    rest = found._replace(**{k: getattr(found, k)[solved] for k in ("active", "multiplier", "feasible", "converged")})
    assert (compare(problems[::2], rest, w[::2]) < 1e-6).all()


@pytest.mark.parametrize(("d", "p"), [(3, 5), (7, 4), (2, 8)])
def test_units_do_not_matter(d, p):
    """Neither the length of a row nor the units of w and c change the active set."""
    rng = np.random.default_rng(0)
    matrices, gap, equal, _ = dual([problem(rng, d, p, "mixed") for _ in range(40)])
    plain = active_set(matrices, gap, equal)
    rows = torch.tensor(10.0 ** rng.uniform(-6, 6, (40, p)))
    found = active_set(matrices * rows.unsqueeze(1) * rows.unsqueeze(2), gap * rows, equal)
    assert torch.equal(found.active, plain.active)
    torch.testing.assert_close(found.multiplier * rows, plain.multiplier, rtol=1e-6, atol=1e-9)
    for unit in (1e-6, 1e6):
        found = active_set(matrices, gap * unit, equal)
        assert torch.equal(found.active, plain.active)
        torch.testing.assert_close(found.multiplier / unit, plain.multiplier, rtol=1e-6, atol=1e-9)
    assert plain.feasible.all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["d", "gap"])
def test_an_element_that_is_not_finite_is_alone(bad, place):
    rng = np.random.default_rng(1)
    matrices, gap, equal, _ = dual([problem(rng, 3, 5, "mixed") for _ in range(7)])
    plain = active_set(matrices, gap, equal)
    (matrices[2, 1] if place == "d" else gap[2])[3] = bad
    found = active_set(matrices, gap, equal)
    others = torch.arange(7) != 2
    assert found.multiplier[2].isnan().all()
    assert bool(found.feasible[2])
    assert torch.equal(found.multiplier[others], plain.multiplier[others])
    assert torch.equal(found.active[others], plain.active[others])


@pytest.mark.parametrize("d", [2, 3, 5])
def test_degenerate_vertices(d):
    """Far more constraints through one point than dimensions, the optimum often at that very point."""
    rng = np.random.default_rng(d)
    problems = []
    for i in range(40):
        sigma, star, w0 = conditioned(rng, d, 10.0 ** (i % 4)), *rng.standard_normal((2, d))
        normals = rng.integers(-2, 3, (4 * d, d)) + np.eye(4 * d, d)  # small integers: many are dependent
        normals = normals[np.abs(normals).sum(1) > 0]
        normals = np.vstack([normals, np.ones((4 * d - len(normals), d))])
        normals *= np.where(normals @ (w0 - star) >= 0, 1, -1)[:, None]  # w* violates them all, the cone is not empty
        problems.append((sigma, star, normals.T, normals @ w0, np.zeros(4 * d, bool)))
    found, w = solutions(problems)
    assert (compare(problems, found, w, by_least_distance) < 1e-6).all()
    assert nonsingular(problems, found) > 1e-12


def test_equalities_that_are_nearly_parallel():
    """A third constraint through their intersection: its lack is rounding, magnified, and no contradiction."""
    rng = np.random.default_rng(0)
    problems = []
    for _ in range(100):
        first, w0, star = rng.standard_normal((3, 2))
        normals = np.stack([first, first + 3e-5 * first[::-1] * [1, -1], rng.standard_normal(2)])
        problems.append((np.eye(2), star, normals.T, normals @ w0, np.array([True, True, False])))
    found, w = solutions(problems)
    assert found.feasible.all()
    assert found.converged.all()
    for one, point in zip(problems, w, strict=True):
        np.testing.assert_allclose(one[2].T @ point, one[3], atol=1e-5)  # eps times 1 over the angle squared


def test_size_tells_rounding_from_a_contradiction():
    """w* = 1 / 3 lies on both sides of a slab of no width, up to the last digit."""
    d = torch.tensor([[[1.0, -1.0], [-1.0, 1.0]]], dtype=torch.float64)
    gap, none = torch.full((1, 2), 1e-17, dtype=torch.float64), torch.zeros(2, dtype=torch.bool)
    assert not active_set(d, gap, none).feasible
    assert active_set(d, gap, none, size=torch.full_like(gap, 1 / 3)).feasible


@pytest.mark.parametrize(("batch", "p"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_do(batch, p):
    found = active_set(torch.ones(batch, p, p).double(), torch.ones(batch, p).double(), torch.zeros(p).bool())
    assert found.active.shape == found.multiplier.shape == (batch, p)
    assert found.feasible.shape == found.converged.shape == (batch,)
    assert found.feasible.all()


def test_running_out_of_iterations_shows():
    eye, gap = torch.eye(3, dtype=torch.float64).expand(2, 3, 3), torch.tensor([[1, 1, 1], [-1, -1, 1]]).double()
    found = active_set(eye, gap, torch.zeros(3).bool(), limit=3)
    assert found.converged.tolist() == [False, True]
    assert found.feasible.all()
    assert active_set(eye, gap, torch.zeros(3).bool()).converged.all()


def test_wrong_shapes_and_types_are_named():
    d, gap, equal = torch.eye(3).double()[None], torch.ones(1, 3).double(), torch.zeros(3).bool()
    with pytest.raises(ValueError, match=r"want d \(B, p, p\)"):
        active_set(d[0], gap, equal)
    with pytest.raises(TypeError, match="float64"):
        active_set(d.float(), gap, equal)
    with pytest.raises(ValueError, match="want equal"):
        active_set(d, gap, equal[:2])
