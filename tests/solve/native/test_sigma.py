"""The fused forward of sigma-Intention against torch: every shape, layout and what is not finite."""

import pytest
import torch
from torch import Tensor

from intention import functional as F
from intention.functional import sigma_intention
from intention.solve.native import library, sigma
from intention.solve.problem import Problem
from intention.solve.transform import fused as door

pytestmark = pytest.mark.skipif(library.library() is None, reason="no compiled kernels")

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = (torch.float32, torch.float64)
SHAPES = [  # N, M, d, k: N = d, lone rows and columns, both sides of every block (16, 64, 192) and of every register
    *((1, 1, 1, 1), (2, 3, 1, 2), (3, 1, 3, 1), (5, 7, 3, 5), (17, 17, 17, 17), (16, 16, 16, 16), (64, 64, 64, 64)),
    *((65, 63, 65, 3), (130, 65, 130, 5), (150, 66, 65, 1), (128, 128, 64, 64), (127, 129, 64, 63), (133, 47, 130, 9)),
    *((191, 48, 17, 5), (192, 49, 17, 64), (193, 80, 17, 65), (300, 1, 64, 64), (300, 5, 64, 1), (300, 200, 3, 5)),
    *((1000, 70, 17, 5), (1000, 33, 64, 130), (513, 12, 500, 7), (700, 200, 300, 2)),
]


def make(
    n: int, m: int, d: int, k: int, dtype: torch.dtype = torch.float32, lead: tuple[int, ...] = (3,), size: float = 3.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys are short enough for an alpha of 1, and queries so long that scores have the size that is asked for."""
    gen = torch.Generator().manual_seed(n + 3 * m + 5 * d + 7 * k)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=gen, dtype=dtype)

    return normal(m, d) * (size * (n / d) ** 0.5), normal(n, d) / n**0.5, normal(n, k)


def in_torch(*args: Tensor, **options: object) -> Tensor:
    with library.off():
        return sigma_intention(*args, **options)  # type: ignore[arg-type, return-value]


def truth(*args: Tensor, **options: object) -> Tensor:
    return in_torch(*(x.double() for x in args), **options)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor, covariance: str = "ridge", scale: float = 1.0
) -> Tensor:
    """The formula in float64, by the eigenvectors of the smaller Gram."""
    query, key, value = query.double(), key.double(), value.double()
    alpha = torch.as_tensor(alpha).double()[..., None, None]
    gain = 1 - alpha if covariance == "convex" else 1.0
    if key.shape[-2] < key.shape[-1]:
        gram = gain * (key @ key.mT) + alpha * torch.eye(key.shape[-2], dtype=torch.float64)
        scores = torch.linalg.solve(gram, key @ query.mT).mT
    else:
        sigma = gain * (key.mT @ key) + alpha * torch.eye(key.shape[-1], dtype=torch.float64)
        scores = torch.linalg.solve(sigma, query.mT).mT @ key.mT
    return torch.softmax(scores * scale, -1) @ value


def served(query: Tensor, key: Tensor, value: Tensor, alpha: float = 1.0) -> bool:
    """Whether the kernel answers, or leaves the call to torch."""
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (query, key, value)]
    problem = Problem(*flat, None, flat[1].new_full(flat[1].shape[:1], alpha), None)
    return sigma.forward(problem, keep=False) is not None


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()


@pytest.fixture
def counted(monkeypatch) -> list[bool]:
    """One entry per call of the kernel: whether it served."""
    calls: list[bool] = []
    original = sigma.forward

    def forward(problem: Problem, keep: bool) -> sigma.Attended | None:
        found = original(problem, keep)
        if library.library() is not None:
            calls.append(found is not None)
        return found

    monkeypatch.setattr(door.native, "forward", forward)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_report_are_those_of_torch(shape, dtype, counted):
    q, k, v = make(*shape, dtype)
    out, info = sigma_intention(q, k, v, return_info=True)
    assert counted == [True]
    expected, told = truth(q, k, v, return_info=True)
    assert out.dtype == dtype
    assert distance(out, expected) < TOLERANCE[dtype]
    assert torch.equal(info.route, told.route)  # pyright: ignore[reportAttributeAccessIssue]
    assert distance(info.condition, told.condition) < TOLERANCE[dtype]  # pyright: ignore[reportAttributeAccessIssue]
    with library.off():
        _, told = sigma_intention(q, k, v, return_info=True)
    assert info.error.dtype == told.error.dtype
    torch.testing.assert_close(info.error, told.error, rtol=1e-5, atol=0)


@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17])
def test_every_number_of_points(d, counted):
    for n in range(d, 300, 7):
        q, k, v = make(n, n % 70 + 1, d, n % 5 + 1, lead=(2,))
        assert distance(sigma_intention(q, k, v), truth(q, k, v)) < TOLERANCE[torch.float32], n
    assert all(counted)


@pytest.mark.parametrize("batch", [1, 2, 3, 15, 16, 17, 33, 100])
def test_small_elements_are_factored_together(batch, counted):
    q, k, v = make(20, 9, 6, 4, lead=(batch,))
    assert distance(sigma_intention(q, k, v), truth(q, k, v)) < TOLERANCE[torch.float32]
    assert counted == [True]


@pytest.mark.parametrize("alpha", [0.9, torch.tensor([[0.7], [0.9]])])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_options(alpha, covariance, counted):
    q, k, v = make(40, 20, 6, 5, lead=(2, 3))
    options = {"alpha": alpha, "covariance": covariance, "scale": 0.3}
    assert distance(sigma_intention(q, k, v, **options), truth(q, k, v, **options)) < TOLERANCE[torch.float32]
    assert counted == [True]


def test_leading_dimensions(counted):
    q, k, v = make(40, 20, 6, 5, lead=(2, 4))
    for key, value, gqa in (
        (k[:1], v[:1], False),
        (k[:, :1], v, False),
        (k[0], v[0], False),
        (k[:, :2], v[:, :2], True),
    ):
        out, info = sigma_intention(q, key, value, enable_gqa=gqa, return_info=True)
        expected, told = truth(q, key, value, enable_gqa=gqa, return_info=True)
        assert out.shape == expected.shape
        assert distance(out, expected) < TOLERANCE[torch.float32]
        assert info.condition.shape == told.condition.shape  # pyright: ignore[reportAttributeAccessIssue]
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    assert distance(sigma_intention(q, k, v), truth(q, k, v)) < TOLERANCE[torch.float32]
    assert len(counted) == 5
    assert all(counted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 9, 8, 5), (300, 70, 17, 64), (200, 130, 64, 1)])
def test_layouts(shape, dtype, counted):
    """Heads behind points, rows of a wider table, storage that starts anywhere, columns apart."""
    q, k, v = make(*shape, dtype, lead=(2, 3))
    expected = sigma_intention(q, k, v)
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x: x.mT.contiguous().mT,
    ):
        assert torch.equal(sigma_intention(change(q), change(k), change(v)), expected)
    assert counted == [True] * 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.0, 1e-3, 1.0, 30.0, 1e3, 1e6])
def test_shares_sum_to_one(size, dtype):
    for shape in ((100, 70, 20, 3), (1000, 33, 8, 1), (4000, 5, 3, 2)):
        q, k, v = make(*shape, dtype, size=size)
        assert served(q, k, v)
        out = sigma_intention(q, k, torch.ones_like(v))
        assert (out - 1).abs().amax() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials_are_exact_to_rounding(dtype):
    """Sigma = I, one feature and a query of 1: scores are the keys, and shares relative to the first exp of them."""
    n, lowest = 1500, -84.0 if dtype == torch.float32 else -703.0
    key = torch.cat(
        [torch.linspace(0, lowest, n - 4, dtype=dtype), torch.tensor([-90, -1e3, -1e15, -1e5], dtype=dtype)]
    )
    value = torch.eye(n, dtype=dtype).unsqueeze(0)
    out = sigma_intention(torch.ones(1, 1, 1, dtype=dtype), key.view(1, n, 1), value, covariance="convex", alpha=1.0)
    shares, expected = out[0, 0, :-4].double() / out[0, 0, 0].double(), key[:-4].double().exp()
    assert ((shares / expected - 1).abs() < 2 * torch.finfo(dtype).eps).all()
    assert (out[0, 0, -3:] == 0).all()


def test_scores_that_grow_from_block_to_block():
    """The largest so far changes with every block of keys, and old parts fall to nothing."""
    n = 1000
    key = torch.linspace(0.01, 1, n).view(1, n, 1) / 20
    value = torch.randn(1, n, 3)
    for sign in (1, -1):
        query = sign * torch.logspace(0, 5, 20).view(1, 20, 1)
        assert served(query, key, value)
        torch.testing.assert_close(
            sigma_intention(query, key, value), truth(query, key, value).float(), rtol=0, atol=2e-3
        )
        small = query[:, :8]
        assert distance(sigma_intention(small, key, value), truth(small, key, value)) < 1e-5


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("shape", [(40, 9, 8, 3), (300, 70, 17, 20), (260, 5, 64, 1)])
def test_what_is_not_finite_shows_where_torch_shows_it(shape, where, bad, counted):
    q, k, v = make(*shape)
    {"query": q, "key": k, "value": v}[where][1, 2, 0] = bad
    out, expected = sigma_intention(q, k, v), in_torch(q, k, v)
    assert counted == [where != "key"]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    wrong = ~torch.isfinite(out)
    assert wrong.any()
    if where == "query":
        assert torch.equal(
            wrong, torch.zeros_like(wrong).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(True))
        )


def test_both_infinities_in_a_column_of_values():
    q, k, v = make(300, 20, 8, 3)
    v[0, 1, 2], v[0, 250, 2] = torch.inf, -torch.inf
    out = sigma_intention(q, k, v)
    assert out[0, :, 2].isnan().all()
    torch.testing.assert_close(out, in_torch(q, k, v), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_every_nan_stays_one():
    """Also one whose last bits are set: they must not reach the exponent."""
    q, k, v = make(40, 20, 8, 3)
    q[0, 5] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    assert sigma_intention(q, k, v)[0].isnan().any(-1).nonzero().flatten().tolist() == [5]


def test_infinite_scores():
    """A row with a score of +inf has no softmax; keys with a score of -inf drop out, even a whole block of them."""
    q = torch.tensor([1e38, -1e38, torch.inf, 1.0]).view(1, 4, 1)
    k = torch.rand(1, 300, 1) + 0.5
    k[0, :250] *= -10
    v = torch.randn(1, 300, 2)
    options = {"alpha": 1.0, "covariance": "convex"}  # Sigma = I
    out, expected = sigma_intention(q, k, v, **options), in_torch(q, k, v, **options)
    assert out.isnan().any(-1).flatten().tolist() == [False, True, True, False]
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_hard_fits_are_done_in_double(counted):
    q, k, v = make(60, 20, 12, 4, lead=(5,))
    k = k * torch.logspace(0, -2, 12)
    alpha = torch.tensor([1.0, 1.0, 1.0, 2e-3, 1.0])
    out, info = sigma_intention(q, k, v, alpha=alpha, return_info=True)
    assert counted == [True]
    assert [F.ROUTES[i] for i in info.route] == ["primal", "primal", "primal", "float64", "primal"]
    torch.testing.assert_close(out, in_torch(q, k, v, alpha=alpha), rtol=1e-4, atol=1e-5)
    assert distance(out, written_out(q, k, v, alpha)) < TOLERANCE[torch.float32]


DUAL_SHAPES = [  # N < d: lone rows, both sides of every block (16, 192) and of every register, many features
    *((1, 3, 5, 2), (2, 1, 3, 1), (5, 7, 11, 3), (7, 16, 13, 9), (16, 17, 64, 5), (17, 16, 64, 64), (10, 10, 64, 64)),
    *((50, 50, 64, 64), (63, 65, 67, 7), (25, 75, 640, 5), (65, 1, 130, 3), (193, 20, 300, 9), (300, 130, 401, 3)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", DUAL_SHAPES)
def test_fewer_points_than_features(shape, dtype, counted):
    q, k, v = make(*shape, dtype)
    out, info = sigma_intention(q, k, v, return_info=True)
    assert counted == [True]
    assert distance(out, written_out(q, k, v, 1.0)) < TOLERANCE[dtype]
    assert (info.route == F.ROUTES.index("dual")).all()
    with library.off():
        _, told = sigma_intention(q, k, v, return_info=True)
    torch.testing.assert_close(info.condition, told.condition, rtol=0.2, atol=0)  # lower bounds


def hard(n: int, d: int, kind: str, lead: tuple[int, ...] = (3,)) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of full rank, of low rank up to a millionth, or of very different lengths."""
    gen = torch.Generator().manual_seed(n + 7 * d)
    q, k, v = (torch.randn(*lead, *s, generator=gen) for s in ((23, d), (n, d), (n, 5)))
    if kind == "low rank":
        k = k[..., :3] @ torch.randn(3, d, generator=gen) + 1e-3 * k
    elif kind == "lengths":
        k = k * torch.logspace(0, -3, n).unsqueeze(-1)
    return q, k, v


HARD = [
    (n, d, kind)
    for n, d in ((61, 64), (64, 64), (67, 64), (13, 17), (17, 17), (19, 17), (131, 17), (5, 67))
    for kind in ("full", "low rank", "lengths")
]


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1e-2, 0.1])
@pytest.mark.parametrize(("n", "d", "kind"), HARD)
def test_hard_conditions(n, d, kind, alpha, counted):
    q, k, v = hard(n, d, kind)
    out, info = sigma_intention(q, k, v, alpha=alpha, return_info=True)
    assert counted == [True]
    assert distance(out, written_out(q, k, v, alpha)) < 1e-5
    assert info.error.amax() < 1e-4


def test_long_scores_are_made_in_double(counted):
    """The factor is good, and yet rounding Q Sigma^-1 to float32 would move scores of thousands."""
    for n, d in ((40, 16), (11, 16)):
        q, k, v = make(n, 30, d, 3, size=3e3)
        out, info = sigma_intention(q, k, v, return_info=True)
        assert (info.route == F.ROUTES.index("float64")).all()
        assert distance(out, written_out(q, k, v, 1.0)) < 1e-6
    assert counted == [True] * 2


def test_what_double_cannot_do_goes_on_to_torch(counted):
    """alpha = 0 and dependent keys; one such element takes the whole call along."""
    q, k, v = make(13, 7, 5, 3, lead=(4,))
    k[2, :, 1] = k[2, :, 0]
    alpha = torch.tensor([1.0, 0.0, 0.0, 1.0])
    out, info = sigma_intention(q, k, v, alpha=alpha, return_info=True)
    assert counted == [False]
    assert info.route[2] == F.ROUTES.index("pinv")
    with library.off():
        torch.testing.assert_close(out, sigma_intention(q, k, v, alpha=alpha), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [1e-2, 1e-5, 1e-8])
def test_hard_conditions_of_float64(alpha, counted):
    """Beyond a ratio of 1e4 a refinement step makes up for the condition."""
    for n, d in ((19, 17), (13, 17)):
        q, k, v = (x.double() for x in hard(n, d, "lengths"))
        out, info = sigma_intention(q, k, v, alpha=alpha, return_info=True)
        assert distance(out, written_out(q, k, v, alpha)) < 1e-7
        assert info.error.amax() < 1e-8
    assert counted == [True] * 2


@pytest.mark.parametrize("n", [200, 29])
def test_hard_parts_of_a_split_element(n):
    """One element, split for two threads: the long queries are all in its second half."""
    q, k, v = make(n, 300, 31, 5, lead=(1,))
    q[:, 150:] *= 1e3
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        out, info = sigma_intention(q, k, v, return_info=True)
    finally:
        torch.set_num_threads(before)
    assert info.route.tolist() == [F.ROUTES.index("float64")]
    assert distance(out, written_out(q, k, v, 1.0)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_scores_in_float32(dtype, counted):
    q, k, v = (x.to(dtype) for x in make(40, 20, 8, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sigma_intention(q, k, v, alpha=0.01)
    assert out.dtype == dtype
    assert counted == [True]
    assert distance(out, written_out(q, k, v, 0.01)) < torch.finfo(dtype).eps


def test_values_that_are_not_allowed():
    q, k, v = make(30, 5, 6, 2)
    for alpha, covariance in ((torch.tensor([1.0, -1.0, 1.0]), "ridge"), (torch.tensor([0.5, 0.5, 2.0]), "convex")):
        with pytest.raises(ValueError, match="alpha"):
            sigma_intention(q, k, v, alpha=alpha, covariance=covariance)


def test_what_the_kernel_leaves_to_torch(counted):
    q, k, v = make(40, 20, 8, 5)
    few = torch.ones(3, 40)
    sigma_intention(q, k, v, is_causal=True)
    sigma_intention(q, k, v, intercept=True)
    sigma_intention(q, k, v, dropout_p=0.5)
    sigma_intention(q, k, v, weight=few)
    sigma_intention(q, k, v, attn_mask=few.unsqueeze(1) > 0)
    sigma_intention(q, k, v, covariance=lambda key, *_: key.mT @ key)
    for solver in ("primal", "dual", "float64"):
        sigma_intention(q, k, v, solver=solver)
    torch.func.vmap(sigma_intention)(q, k, v)
    assert counted == []
    wide = make(520, 3, 513, 2)
    sigma_intention(*wide)
    assert counted == [False]
    sigma_intention(q, k[:, :7], v[:, :7])
    sigma_intention(q.half(), k.half(), v.half())
    with torch.autocast("cpu"):
        sigma_intention(q, k, v)
    assert counted == [False, True, True, True]


def test_derivatives_and_transforms_go_on_as_before():
    q, k, v = make(40, 20, 8, 5, torch.float64, lead=(2,))
    out = sigma_intention(q, k, v)
    with_grad = [x.clone().requires_grad_() for x in (q, k, v)]
    again = sigma_intention(*with_grad)
    torch.testing.assert_close(again, out)
    assert torch.autograd.gradcheck(sigma_intention, with_grad, fast_mode=True)
    torch.testing.assert_close(torch.func.vmap(sigma_intention)(q, k, v), out)
    primal, tangent = torch.func.jvp(lambda x: sigma_intention(x, k, v), (q,), (torch.ones_like(q),))  # pyright: ignore[reportAssignmentType]
    torch.testing.assert_close(primal, out)
    assert tangent.abs().amax() > 0
    torch.testing.assert_close(torch.func.grad(lambda x: sigma_intention(q, k, x).sum())(v).sum().item(), 200.0)
    compiled = torch.compile(sigma_intention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), out)


@pytest.mark.parametrize("batch", [1, 2, 3, 9])
@pytest.mark.parametrize("queries", [128, 129, 300])
def test_threads_change_nothing(batch, queries):
    """Where there are fewer elements than threads, their queries are split."""
    q, k, v = make(200, queries, 17, 5, lead=(batch,))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, told = sigma_intention(q, k, v, return_info=True)
        torch.set_num_threads(2)
        two, info = sigma_intention(q, k, v, return_info=True)
    finally:
        torch.set_num_threads(before)
    assert distance(two, one) < TOLERANCE[torch.float32]
    assert info.condition.shape == told.condition.shape == (batch,)
    torch.testing.assert_close(info.condition, told.condition)


def test_attention_is_the_convex_case_without_keys():
    q, k, v = make(300, 70, 16, 16)
    torch.testing.assert_close(
        sigma_intention(q, k, v, covariance="convex", alpha=1, scale=0.25), F.attention(q, k, v), rtol=1e-4, atol=1e-5
    )
