"""Plain calls take a short way to the kernels; it must give what the long one gives."""

import pytest
import torch
from torch import Tensor

from intention import functional as F
from intention.solve.native.library import library
from intention.solve.ridge import plain

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

SHAPES = [((2, 3), 10, 7, 8, 1), ((5,), 6, 4, 20, 3), ((2, 2), 40, 9, 17, 12)]  # lead, N, M, d, k
HARD = 1e-4  # an alpha with which the factor alone does not serve


def points(shape, dtype=torch.float32) -> list[Tensor]:
    lead, n, m, d, k = shape
    gen = torch.Generator().manual_seed(0)
    sizes = ((m, d), (n, d), (n, k))
    return [torch.randn(*lead, *s, generator=gen, dtype=dtype).requires_grad_() for s in sizes]


def padding(shape, rows=1) -> Tensor:
    """A mask that leaves out a third of the points of each element, the same for all queries."""
    lead, n = shape[:2]
    gen = torch.Generator().manual_seed(1)
    return (torch.rand(*lead, 1, n, generator=gen) > 1 / 3).expand(*lead, rows, n)


def both(inputs, alpha, **options):
    """The short way, which must have been taken, and the long one."""
    taken: list[Tensor | None] = []
    original = F.plain
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "plain", lambda *args: taken.append(original(*args)) or taken[-1])
        short = F.intention(*inputs, alpha=alpha, **options)
        patch.setattr(F, "plain", lambda *_: None)
        long = F.intention(*inputs, alpha=alpha, **options)
    assert taken[0] is short
    return short, long


def assert_same(a, b):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"intercept": True}, {"scale": 0.5}])
@pytest.mark.parametrize("alpha", [1.0, HARD])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_and_gradients_are_equal_bit_by_bit(shape, alpha, options):
    for dtype in (torch.float32, torch.float64):
        inputs = points(shape, dtype)
        short, long = both(inputs, alpha, **options)
        upstream = torch.randn_like(short)
        assert_same([short], [long])
        with torch.no_grad():
            assert_same([F.intention(*inputs, alpha=alpha, **options)], [short])
        assert_same(*(torch.autograd.grad(out, inputs, upstream) for out in (short, long)))


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("alpha", [1.0, HARD])
@pytest.mark.parametrize("shape", [*SHAPES, ((21,), 6, 4, 20, 3), ((37,), 20, 4, 5, 3)])
def test_points_that_a_mask_leaves_out(shape, alpha, scale):
    """Whatever they hold, they count nowhere and have no gradient: none even where others have NaN."""
    for dtype in (torch.float32, torch.float64):
        inputs, mask = points(shape, dtype), padding(shape)
        with torch.no_grad():
            for x in inputs[1:]:
                x[~mask.squeeze(-2)] = torch.nan
        short, long = both(inputs, alpha, attn_mask=mask, scale=scale)
        assert not short.isnan().any()
        assert_same([short], [long])
        with torch.no_grad():
            assert_same([F.intention(*inputs, alpha=alpha, attn_mask=mask, scale=scale)], [short])
        upstream = torch.randn_like(short)
        upstream[0] = torch.nan
        grads, others = (torch.autograd.grad(out, inputs, upstream) for out in (short, long))
        assert_same([x.nan_to_num(7.0) for x in grads], [x.nan_to_num(7.0) for x in others])
        assert not grads[1][1:].isnan().any()
        assert all((x[~mask.squeeze(-2)] == 0).all() for x in grads[1:])


def test_masks_of_other_shapes():
    shape = SHAPES[0]
    (outer, inner), n, m = shape[:3]
    inputs, whole = points(shape), padding(shape)
    for mask in (whole, whole[0], whole[0, 0], whole[0, 0, 0], whole[:, :1], whole[..., :1], padding(shape, m)):
        short, long = both(inputs, 1.0, attn_mask=mask)
        assert_same([short], [long])
        assert_same(*(torch.autograd.grad(out.sum(), inputs) for out in (short, long)))
    flat = whole.reshape(outer * inner, 1, n)
    for mask in (flat, padding(shape, m + 1), whole[..., :-1]):
        with pytest.raises(ValueError, match="attn_mask must broadcast"):
            F.intention(*inputs, alpha=1.0, attn_mask=mask)


def test_a_mask_that_was_written_to():
    inputs, mask = points(SHAPES[0]), padding(SHAPES[0]).clone()
    out = F.intention(*inputs, alpha=1.0, attn_mask=mask)
    mask.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_an_alpha_for_each_head(covariance):
    for dtype in (torch.float32, torch.float64):
        inputs = points(SHAPES[0], dtype)
        with torch.no_grad():
            for alpha in (torch.tensor([0.2, 0.5, 0.9], dtype=dtype), torch.tensor(0.5, dtype=dtype)):
                assert_same(*([x] for x in both(inputs, alpha, covariance=covariance)))
            with pytest.raises(ValueError, match="alpha must be"):
                F.intention(*inputs, alpha=-torch.ones(3, dtype=dtype), covariance=covariance)
    alpha = torch.tensor([0.2, 0.5, 0.9], dtype=dtype, requires_grad=True)
    F.intention(*inputs, alpha=alpha, covariance=covariance).sum().backward()
    assert alpha.grad is not None


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2]])
def test_gradients_that_are_asked_for(wanted):
    inputs = points(SHAPES[0])
    given = [x if i in wanted else x.detach() for i, x in enumerate(inputs)]
    short, long = both(given, 1.0)
    asked = [inputs[i] for i in wanted]
    assert_same(*(torch.autograd.grad(out.square().sum(), asked) for out in (short, long)))


def test_layouts():
    """Heads beside the points, as projections give them; a gradient that is broadcast."""
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in points(SHAPES[2])]
    short, long = both(inputs, 1.0)
    assert_same(*(torch.autograd.grad(out.sum(), inputs) for out in (short, long)))


@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_and_batches_of_gradients(masked):
    inputs, mask = points(SHAPES[0], torch.float64), padding(SHAPES[0]) if masked else None
    assert torch.autograd.gradgradcheck(lambda *x: F.intention(*x, mask, alpha=1.0), inputs)
    short, long = both(inputs, 1.0, attn_mask=mask)
    upstream = torch.randn(3, *short.shape, dtype=torch.float64)
    batched = [torch.autograd.grad(out, inputs, upstream, is_grads_batched=True) for out in (short, long)]
    for x, y in zip(*batched, strict=True):
        torch.testing.assert_close(x, y)


def test_saved_tensors_may_come_back_in_another_layout():
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in points(SHAPES[2])]
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x.detach().clone(memory_format=torch.contiguous_format)
    ):
        short, long = both(inputs, 1.0)
    assert_same(*(torch.autograd.grad(out.sum(), inputs) for out in (short, long)))


def test_what_is_not_plain_is_left_to_the_long_way():
    q, k, v = points(SHAPES[0])
    for args in (
        (q[0], k, v),
        (q[..., :0, :], k, v),
        (q.double(), k, v),
        (q[0, 0], k[0, 0], v[0, 0]),
        (q.bfloat16(),) * 3,
    ):
        assert plain.plain(*args, None, 1.0, False, False, 1.0) is None
    with pytest.raises(ValueError, match="alpha must be finite"):
        F.intention(q, k, v, alpha=-1.0)
    with pytest.raises(ValueError, match="same number of features"):
        F.intention(q[..., :3], k, v, alpha=1.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("alpha", [1.0, HARD, 0.0])  # the last one has elements that are left to the SVD
@pytest.mark.parametrize("shape", SHAPES)
def test_compiled_calls_give_the_same(shape, alpha, masked):
    q, k, v = points(shape)
    mask = padding(shape) if masked else None
    with torch.no_grad():
        k[0, ..., -1, :] = k[0, ..., 0, :]
        if mask is not None:
            for x in (k, v):
                x[~mask.squeeze(-2)] = torch.nan
    compiled(q, k, v, mask, alpha)


def test_compiled_calls_with_masks_of_other_shapes():
    whole, inputs = padding(SHAPES[0]), points(SHAPES[0])
    for mask in (whole[0], whole[0, 0], whole[0, 0, 0], whole[:, :1], padding(SHAPES[0], SHAPES[0][2])):
        compiled(*inputs, mask, 1.0)


def compiled(q, k, v, mask, alpha):
    """The operator of plain calls, which must have been taken, and the eager call."""
    torch._dynamo.reset()
    programs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        programs.append(graph.code)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    got = torch.compile(lambda *x: F.intention(*x, alpha=alpha), backend=backend)(q, k, v, mask)
    assert "intention.plain(" in programs[0]
    want = F.intention(q, k, v, mask, alpha=alpha)
    assert not want.isnan().any()
    upstream = torch.randn_like(want)
    assert_same([got], [want])
    assert_same(*(torch.autograd.grad(out, [q, k, v], upstream) for out in (got, want)))


@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_of_gradients_of_one_compiled_solve(masked):
    """What a forward keeps is one buffer of the whole batch, which torch.vmap must not repeat as it is."""
    inputs = [x.detach() for x in points(SHAPES[0], torch.float64)]
    mask = padding(SHAPES[0]).squeeze(-2) if masked else None
    out, kept = torch.ops.intention.plain(*inputs, mask, 1.0, False, 1.0, True)

    def pull(grad: Tensor) -> tuple[Tensor, ...]:
        needs = [True, True, True, False]
        return torch.ops.intention.plain_backward(grad, *inputs, mask, kept, 1.0, False, 1.0, needs)[:3]

    upstream = torch.randn(3, *out.shape, dtype=out.dtype)
    for got, *want in zip(torch.func.vmap(pull)(upstream), *map(pull, upstream), strict=True):
        torch.testing.assert_close(got, torch.stack(want))
