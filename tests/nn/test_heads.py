"""Heads: embeddings, the kinds of alpha, scales, masks, w."""

import math

import pytest
import torch
from torch import nn

import intention
from intention import functional as F
from intention.nn import (
    Attention,
    ContextAlpha,
    Intention,
    LearnableAlpha,
    LinearAttention,
    MultiheadAttention,
    MultiheadDelta,
    MultiheadIntention,
    NeuralProcess,
    SigmaIntention,
    mlp,
)
from intention.nn.scaling import output_scale, variance_scale

N, M, D, K, B = 11, 7, 3, 5, 2


def points(dtype=torch.float64, n=N, d=D):
    gen = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

    return randn(B, M, d), randn(B, n, d), randn(B, n, K)


def off(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


# --- the computations -------------------------------------------------------------------------------------------------


def test_identity_embeddings_give_least_squares():
    """The module contains f_ls: Q (K'K + alpha I)^-1 K'V."""
    query, key, value = points()
    want = query @ torch.linalg.solve(key.mT @ key + 0.3 * torch.eye(D, dtype=key.dtype), key.mT @ value)
    assert off(Intention(0.3)(query, key, value), want) < 1e-12
    embedded = Intention(0.3, embed_query=nn.Identity(), embed_key=nn.Identity(), embed_value=nn.Identity())
    assert torch.equal(embedded(query, key, value), Intention(0.3)(query, key, value))


@pytest.mark.parametrize(
    ("head", "call"),
    [
        (lambda **e: Intention(0.3, **e), lambda *x: F.intention(*x, alpha=0.3)),
        (lambda **e: SigmaIntention(0.3, **e), lambda *x: F.sigma_intention(*x, alpha=0.3)),
        (lambda **e: Attention(**e), F.attention),
        (lambda **e: LinearAttention(**e), F.linear_attention),
    ],
    ids=["intention", "sigma", "attention", "linear"],
)
def test_each_head_embeds_and_calls(head, call):
    query, key, value = points()
    embed = {
        f"embed_{name}": nn.Linear(i, o).double() for name, i, o in (("query", D, 13), ("key", D, 13), ("value", K, 2))
    }
    out = head(**embed)(query, key, value)
    want = call(embed["embed_query"](query), embed["embed_key"](key), embed["embed_value"](value))
    assert torch.equal(out, want)
    out.sum().backward()
    assert all(p.grad.abs().sum() > 0 for e in embed.values() for p in e.parameters() if p.dim() == 2)


def test_tied_embeddings_are_one_module():
    embed = mlp(D, 13, 13)
    head = Intention(0.3, embed_query=embed, embed_key=embed)
    assert len(list(head.parameters())) == 4
    assert head.embed_query is head.embed_key


def test_neural_process_is_the_formula():
    query, key, value = points()
    pair, out = mlp(D + K, 13, 17).double(), mlp(D + 17, 13, 2).double()
    head = NeuralProcess(embed_pair=pair, embed_output=out)
    context = pair(torch.cat([key, value], -1)).mean(-2, keepdim=True).expand(B, M, 17)
    assert off(head(query, key, value), out(torch.cat([query, context], -1))) < 1e-12
    # the context embedding of the paper's block acts on the mean
    after = NeuralProcess(embed_context=pair, embed_output=out)
    context = pair(torch.cat([key, value], -1).mean(-2, keepdim=True)).expand(B, M, 17)
    assert off(after(query, key, value), out(torch.cat([query, context], -1))) < 1e-12


@pytest.mark.parametrize("causal", [False, True])
def test_neural_process_sees_what_the_mask_shows(causal):
    query, key, value = points()
    head = NeuralProcess(embed_output=mlp(D + D + K, 13, 2).double())
    keep = torch.arange(N) < 4
    if causal:
        out = head(query, key, value, is_causal=True)
        rows = [head(query[:, t : t + 1], key[:, : t + 1], value[:, : t + 1]) for t in range(M)]
        assert off(out, torch.cat(rows, 1)) < 1e-12
    else:
        out = head(query, key.masked_fill(~keep[:, None], torch.nan), value, keep.view(1, 1, N))
        assert off(out, head(query, key[:, :4], value[:, :4])) < 1e-12
        rows = keep.expand(B, M, N).clone()
        rows[:, 3] = False
        out = head(query, key, value, rows)
        assert off(out[:, :3], head(query, key[:, :4], value[:, :4])[:, :3]) < 1e-12
        assert torch.isfinite(out).all()


# --- w ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("n", [2, N])
def test_w_is_the_map_that_was_fitted(intercept, n):
    query, key, value = points(n=n, d=4)
    out, w = Intention(0.3, intercept=intercept)(query, key, value, return_w=True)
    context = intention.fit(key, value, 0.3, intercept=intercept)
    assert off(w[:, :4], context.w) < 1e-10
    assert off(out, context(query)) < 1e-10
    if intercept:
        assert off(w[:, 4:], context(torch.zeros(B, 1, 4, dtype=torch.float64))) < 1e-10


@pytest.mark.parametrize("covariance", ["ridge", "convex", "within"])
@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_w_and_its_embedding_do_not_feel_an_offset(covariance, offset, dtype):
    """Keys far from 0: with w on request, or embedded, the prediction is what it is without."""
    query, key, value = (x.to(dtype) for x in points(n=31, d=4))
    query, key, value = query + offset, key + offset, value + 1e2
    if covariance == "within":
        value = torch.nn.functional.one_hot(torch.arange(31) % 3).to(dtype).expand(B, -1, -1)
    keep, weight = torch.arange(31).view(1, 31) != 5, torch.rand(B, 31, dtype=dtype)
    weight[:, 7] = 0
    seen = {"attn_mask": keep, "weight": weight}
    options = {"alpha": 0.1, "intercept": True, "covariance": covariance}
    want = Intention(**options)(query, key, value, **seen)
    out, w = Intention(**options)(query, key, value, **seen, return_w=True)
    embedded = Intention(**options, embed_w=nn.Identity())(query, key, value, **seen)
    limit = 1e-4 if dtype == torch.float32 else 1e-9
    spread = (want - want.mean(-2, keepdim=True)).abs().max()
    assert (out - want).abs().max() < limit * spread
    assert (embedded - want).abs().max() < limit * spread
    fitted = intention.fit(key.double(), value.double(), 0.1, (weight * keep).double(), True, covariance)
    assert off(w[:, :4].double(), fitted.w) < limit
    assert off(w[:, 4].double(), fitted.intercept) < limit


def test_w_with_an_offset_has_the_gradients_of_the_call():
    query, key, value = (x.detach().requires_grad_() for x in points(n=31, d=4))
    head = Intention(ContextAlpha(4, K, start=0.1).double(), intercept=True, scale=0.7)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    one = torch.autograd.grad(head(query, key + 10, value).square().sum(), (query, key, value))
    two = torch.autograd.grad(head(query, key + 10, value, return_w=True)[0].square().sum(), (query, key, value))
    assert all(off(a, b) < 1e-9 for a, b in zip(two, one, strict=True))


def test_what_a_module_prints():
    text = repr(Intention(0.1, intercept=True, covariance="convex", kernel="gaussian"))
    assert "alpha=0.1, covariance='convex', intercept=True, kernel='gaussian', scale=None" in text
    assert "alpha=1.0, covariance='ridge', intercept=False, kernel=None" in repr(Intention())
    assert "alpha=LearnableAlpha, covariance='ridge', intercept=True" in repr(
        SigmaIntention(LearnableAlpha(), intercept=True)
    )
    assert "scale=0.5" in repr(Attention(scale=0.5))
    assert "scale=0.5" in repr(LinearAttention(scale=0.5))
    assert "12, 3, softmax=True, alpha=0.25, covariance='ridge', scale='variance'" in repr(
        MultiheadIntention(12, 3, softmax=True, alpha=torch.tensor(0.25), covariance="ridge")
    )
    assert "12, 3, scale=0.5" in repr(MultiheadAttention(12, 3, scale=0.5))
    assert "MultiheadDelta(\n  12, 3" in repr(MultiheadDelta(12, 3))


def test_w_follows_the_scale_and_its_embedding():
    query, key, value = points()
    embed = nn.Linear(K, 2).double()
    for head, plain in (
        (Intention(0.3, embed_w=embed, scale="variance"), Intention(0.3, scale="variance")),
        (LinearAttention(embed_w=embed, scale=0.1), LinearAttention(scale=0.1)),
    ):
        out, w = head(query, key, value, return_w=True)
        assert off(w, embed(plain(query, key, value, return_w=True)[1])) < 1e-12
        assert off(out, query @ w) < 1e-12
        assert torch.equal(head(query, key, value), out)
        assert off(plain(query, key, value, return_w=True)[0], plain(query, key, value)) < 1e-10


def test_one_w_needs_one_fit():
    query, key, value = points()
    per_query = torch.ones(M, N, dtype=torch.bool)
    for head in (Intention(embed_w=nn.Identity()), LinearAttention(embed_w=nn.Identity())):
        with pytest.raises(ValueError, match="need one fit for all queries"):
            head(query, key, value, per_query)
        with pytest.raises(ValueError, match="is_causal=True"):
            head(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match="need one fit"):
        Intention(kernel="gaussian")(query, key, value, per_query)


# --- alpha ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_a_learnable_alpha_starts_where_told_and_stays_positive(covariance):
    query, key, value = points(torch.float32)
    alpha = LearnableAlpha(0.25, covariance=covariance)
    head = Intention(alpha, covariance=covariance)
    assert off(head(query, key, value), F.intention(query, key, value, alpha=0.25, covariance=covariance)) < 1e-6
    optimiser = torch.optim.SGD(head.parameters(), 1e3)
    head(query, key, value).square().sum().backward()
    assert alpha.theta.grad != 0
    for sign in (1, -1, -1, 1e3, -2e3):
        alpha.theta.grad = torch.tensor([sign * 0.015])
        optimiser.step()
        assert 0 < alpha().item() < (1 if covariance == "convex" else math.inf)
        assert torch.isfinite(head(query, key, value)).all()


def test_the_two_parametrisations_agree():
    """(1 - sigmoid(theta)) K'K + sigmoid(theta) I is a multiple of K'K + exp(theta) I."""
    query, key, value = points()
    ridge, convex = LearnableAlpha(0.7), LearnableAlpha(covariance="convex")
    with torch.no_grad():
        ridge.theta.copy_(torch.tensor(-0.4))
        convex.theta.copy_(torch.tensor(-0.4))
    a = Intention(ridge)(query, key, value)
    b = Intention(convex, covariance="convex")(query, key, value) * (1 - convex())
    assert off(a, b) < 1e-6


def test_alpha_per_head_and_its_gradient():
    query, key, value = (x.unsqueeze(1).expand(B, 4, *x.shape[1:]) for x in points())
    alpha = LearnableAlpha(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), dtype=torch.float64)
    out = Intention(alpha)(query, key, value)
    for head in range(4):
        assert off(out[:, head], F.intention(*(x[:, head] for x in (query, key, value)), alpha=0.1 * (head + 1))) < 1e-9
    out.square().sum().backward()
    assert (alpha.theta.grad != 0).all()


def test_an_alpha_from_the_context_is_learnt_and_ignores_masked_points():
    query, key, value = points(torch.float32)
    alpha = ContextAlpha(D, K, start=0.3)
    head = Intention(alpha)
    assert off(head(query, key, value), F.intention(query, key, value, alpha=0.3)) < 1e-6
    nn.init.normal_(alpha.answer[-1].weight)
    keep = torch.arange(N) < torch.tensor([N, 4]).view(B, 1, 1)
    holes = key.masked_fill(~keep.mT, torch.nan)
    out = head(query, holes, value.masked_fill(~keep.mT, torch.nan), keep)
    assert off(out[1], head(query[1], key[1, :4], value[1, :4])) < 1e-5
    assert alpha(key, value)[0] != alpha(key, value)[1]
    out.sum().backward()
    assert all(torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0 for p in alpha.parameters())


def test_an_alpha_from_the_context_must_not_see_the_future():
    query, key, value = points(torch.float32)
    head = Intention(ContextAlpha(D, K))
    with pytest.raises(ValueError, match="sees all points"):
        head(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match="sees all points"):
        head(query, key, value, torch.ones(M, N, dtype=torch.bool))


def test_bad_alphas_are_named():
    with pytest.raises(TypeError, match="LearnableAlpha"):
        Intention(nn.Parameter(torch.tensor(0.3)))
    with pytest.raises(ValueError, match=r"covariance='convex'"):
        Intention(LearnableAlpha(0.3), covariance="convex")
    with pytest.raises(ValueError, match=r"inside \(0, 1\)"):
        LearnableAlpha(1.0, covariance="convex")
    with pytest.raises(ValueError, match=r"inside \(0, inf\)"):
        LearnableAlpha(0.0)
    with pytest.raises(ValueError, match="alpha must be finite"):
        Intention(-1.0)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        SigmaIntention(1.5, covariance="convex")


def test_a_module_of_the_users_own_gives_alpha():
    class Trace(nn.Module):
        def forward(self, key, value, weight):
            return key.square().sum((-2, -1)) / 10

    query, key, value = points()
    want = F.intention(query, key, value, alpha=key.square().sum((-2, -1)) / 10)
    assert torch.equal(Intention(Trace())(query, key, value), want)


# --- scale ------------------------------------------------------------------------------------------------------------


def test_variance_scale_is_the_closed_form_where_it_holds():
    for n, d in ((10, 64), (1, 16), (100, 1000)):
        assert variance_scale(n, d) == pytest.approx(math.sqrt(d - n - 1))
    for n, d in ((1000, 64), (100, 16), (64, 4)):
        assert variance_scale(n, d) == pytest.approx(math.sqrt(n * (n - d - 1) / d))
    sizes = torch.tensor([0, 1, 10, 62, 63, 64, 65, 66, 100, 1000])
    for scale in (variance_scale, output_scale):
        each = torch.tensor([scale(n, 64) for n in sizes.tolist()])
        assert torch.allclose(scale(sizes, 64), each)


@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0, 1.05, 1.3, 2.0, 8.0])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_the_map_starts_with_unit_variance(d, share, covariance):
    """With the closed forms alone it would be 0.06 at N = d + 2, and 0 between."""
    torch.manual_seed(0)
    n = max(1, round(share * d))
    query, key = torch.randn(64, 50, d), torch.randn(64, n, d)
    head = Intention(covariance=covariance, scale="variance")
    variance = head(query, key, torch.eye(n).expand(64, n, n)).var().item()
    assert 0.45 < variance < 1.1


@pytest.mark.parametrize("n", [4, 16, 40])
def test_the_output_starts_with_the_variance_of_the_values_or_less(n):
    torch.manual_seed(0)
    query, key, value = torch.randn(64, 50, 16), torch.randn(64, n, 16), 3 * torch.randn(64, n, 5)
    variance = Intention(scale="output")(query, key, value).var().item() / 9
    assert (0.4 if n < 40 else 0.2) < variance < 1.1
    exact = key @ torch.randn(16, 5)  # what the keys tell is returned in its own size
    assert Intention(1e-6, scale="output")(query, key, exact).var() < 1.2 * exact.var() * max(1, 16 / n)


def test_scale_counts_the_points_that_a_query_sees():
    query, key, value = points()
    for head in (
        Intention(0.3, scale="variance"),
        SigmaIntention(0.3, scale="variance"),
        Intention(0.3, scale="output"),
    ):
        keep = torch.arange(N) < torch.tensor([N, 5]).view(B, 1, 1)
        out = head(query, key, value, keep)
        for i, n in enumerate((N, 5)):
            assert off(out[i], head(query[i], key[i, :n], value[i, :n])) < 1e-9
        weight = keep[:, 0].double()
        assert off(head(query, key, value, weight=weight), out) < 1e-9
        logs = torch.where(keep, 0.0, -torch.inf).double()
        assert off(head(query, key, value, logs), out) < 1e-9
        rows = torch.ones(B, M, N, dtype=torch.bool).tril()
        each = [head(query[:, t : t + 1], key[:, : t + 1], value[:, : t + 1]) for t in range(M)]
        assert off(head(query, key, value, rows), torch.cat(each, 1)) < 1e-9
        assert off(head(query, key, value, is_causal=True), torch.cat(each, 1)) < 1e-9
        hidden = key.clone()
        hidden[1, 5:] = torch.nan
        causal = head(query, hidden, value, keep, is_causal=True)
        assert off(causal[1], head(query[1], key[1, :5], value[1, :5], is_causal=True)) < 1e-9


def test_more_causal_queries_than_keys():
    query, key, value = points(n=4)
    head = Intention(0.3, scale="variance")
    out = head(query, key, value, is_causal=True)
    assert off(out[:, 3:], head(query[:, 3:], key, value)) < 1e-9


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_a_large_alpha_with_scale_attention_is_attention(covariance):
    query, key, value = points()
    alpha = 1e7 if covariance == "ridge" else 1.0
    sigma = SigmaIntention(alpha, covariance=covariance, scale="attention")
    assert off(sigma(query, key, value), F.attention(query, key, value)) < 1e-5
    linear = Intention(alpha, covariance=covariance, scale="attention")
    assert off(linear(query, key, value), F.linear_attention(query, key, value, scale=D**-0.5)) < 1e-5


def test_scales_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="number, None, or one of 'variance', 'output', 'attention'"):
        Intention(scale="varience")
    with pytest.raises(ValueError, match="a softmax averages"):
        SigmaIntention(scale="output")
    for options in ({"kernel": "gaussian"}, {"intercept": True}):
        with pytest.raises(ValueError, match="use scale=None"):
            Intention(scale="variance", **options)
    with pytest.raises(ValueError, match="embed_w acts on w"):
        Intention(kernel="gaussian", embed_w=nn.Identity())
    with pytest.raises(TypeError, match="scale must be a number"):
        Intention(scale=[1.0])


def test_float16_queries_survive_a_large_scale():
    query, key, value = points(torch.float32, n=3000)
    query, value = 100 * query, 0.1 * value
    head = Intention(scale="variance")
    assert (query * variance_scale(3000, D)).abs().max() > 65504  # beyond float16, and the answer is not
    half = head(query.half(), key.half(), value.half())
    want = head(query, key, value)
    assert want.abs().max() < 65504
    assert half.dtype == torch.float16
    assert off(half.float(), want) < 2e-2


def test_the_scale_has_a_gradient():
    """1 - lambda follows the trained value, and so does alpha / sqrt(d)."""
    query, key, value = points()
    for scale in ("variance", "attention"):
        alpha = LearnableAlpha(0.3, covariance="convex", dtype=torch.float64)
        head = Intention(alpha, covariance="convex", scale=scale)

        def loss(theta, head=head, alpha=alpha):
            return torch.func.functional_call(head, {"alpha.theta": theta}, (query, key, value)).square().sum()

        theta = alpha.theta.detach().clone().requires_grad_()
        assert torch.autograd.gradcheck(loss, theta)


# --- masks and fits ---------------------------------------------------------------------------------------------------


def test_a_kernel_head_takes_masks_and_embeddings():
    query, key, value = points()
    keep = torch.arange(N) < torch.tensor([N, 5]).view(B, 1, 1)
    embed = nn.Linear(D, 4).double()
    head = Intention(0.3, kernel="gaussian", embed_query=embed, embed_key=embed)
    out = head(query, key, value, keep)
    assert off(out[1], head(query[1], key[1, :5], value[1, :5])) < 1e-9
    assert off(head.fit(key, value)(embed(query)), head(query, key, value)) < 1e-12
    assert off(head.fit(key, value, keep)(embed(query)), out) < 1e-12
    with pytest.raises(ValueError, match="need one fit"):
        head.fit(key, value, torch.ones(M, N, dtype=torch.bool))


@pytest.mark.parametrize("head", [Intention(0.3), SigmaIntention(0.3), Attention(), LinearAttention()])
def test_a_fully_masked_context_gives_zero_and_no_nan(head):
    query, key, value = (x.requires_grad_() for x in points())
    keep = torch.zeros(B, 1, N, dtype=torch.bool)
    keep[0] = True
    out = head(query, key, value, keep)
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (query, key, value))


def test_every_option_of_a_fitted_head_arrives():
    query, key, value = points()
    weight = torch.rand(B, N, dtype=torch.float64)
    labels = torch.nn.functional.one_hot(torch.arange(N) % 3).double().expand(B, N, 3)
    normal, bound = torch.eye(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    constraint = intention.constraints.LinearConstraint(normal, bound)
    head = Intention(0.3, intercept=True, constraints=constraint)
    want = intention.fit(key, value, 0.3, weight, intercept=True).constrain(normal, bound)
    out, w = head(query, key, value, weight=weight, return_w=True)
    assert off(out, want(query)) < 1e-9
    assert (w >= -1e-9).all()
    assert off(w, want.w) < 1e-9
    kernel = Intention(0.3, intercept=True, kernel="gaussian", covariance="within")
    want = intention.fit(key, labels, 0.3, weight, True, "within", "gaussian")
    assert off(kernel(query, key, labels, weight=weight), want(query)) < 1e-9
    with pytest.raises(ValueError, match="no w in the space of the keys"):
        kernel(query, key, labels, return_w=True)


def test_options_of_the_other_heads_arrive():
    query, key, value = points()
    keep = torch.rand(M, N) < 0.7
    keep[:, 0] = True
    assert torch.equal(Attention(scale=0.2)(query, key, value, keep), F.attention(query, key, value, keep, scale=0.2))
    assert torch.equal(Attention()(query, key, value, is_causal=True), F.attention(query, key, value, is_causal=True))
    want = F.sigma_intention(query, key, value, keep, alpha=0.3, intercept=True, scale=0.2)
    assert torch.equal(SigmaIntention(0.3, intercept=True, scale=0.2)(query, key, value, keep), want)
    for head, call in ((LinearAttention(scale=0.2), F.linear_attention),):
        assert torch.equal(head(query, key, value, keep), call(query, key, value, keep, scale=0.2))
        assert torch.equal(head(query, key, value, is_causal=True), call(query, key, value, is_causal=True, scale=0.2))


def test_an_expanded_mask_is_shared():
    """Equal for all queries by its stride: one w serves."""
    query, key, value = points()
    keep = torch.arange(N) < 5
    for head in (Intention(0.3), LinearAttention()):
        out, w = head(query, key, value, keep.expand(B, M, N), return_w=True)
        assert off(out, head(query, key[:, :5], value[:, :5])) < 1e-9
        assert w.shape == (B, D, K)


def test_what_a_mask_hides_may_hold_anything():
    query, key, value = points()
    keep = (torch.arange(N) < 5).view(1, 1, N)
    hidden = [x.masked_fill(~keep.mT, torch.nan) for x in (key, value)]
    heads = [Intention(0.3), SigmaIntention(0.3), Intention(0.3, kernel="gaussian"), Attention(), NeuralProcess()]
    for head in heads:
        assert off(head(query, *hidden, keep), head(query, key[:, :5], value[:, :5])) < 1e-9


def test_counts_of_weights_and_masks_together():
    """A point counts in N if its weight is above 0 and the query sees it, however a mask says that."""
    query, key, value = points()
    head = Intention(0.3, scale="variance")
    weight = (torch.arange(N) != 2).double()
    rows = torch.ones(M, N, dtype=torch.bool).tril()
    each = []
    for t in range(M):
        own = [i for i in range(t + 1) if i != 2]
        each.append(head(query[:, t : t + 1], key[:, own], value[:, own]))
    want = torch.cat(each, 1)
    assert off(head(query, key, value, rows, weight=weight), want) < 1e-9
    assert off(head(query, key, value, weight=weight.expand(B, N), is_causal=True), want) < 1e-9
    shared = torch.arange(N) < 4
    want = head(query, key[:, [0, 1, 3]], value[:, [0, 1, 3]])
    assert off(head(query, key, value, shared.view(1, N), weight=weight), want) < 1e-9
    for low in (-torch.inf, torch.finfo(torch.float64).min, -1e9, -1e4):
        logs = torch.zeros(N, dtype=torch.float64).masked_fill(~shared, low)
        assert off(head(query, key, value, logs.view(1, N), weight=weight), want) < 1e-9
        assert off(head(query, key, value, logs.expand(M, N).clone(), weight=weight), want) < 1e-9


def test_an_alpha_from_the_context_counts_points_as_the_fit_does():
    query, key, value = points(torch.float32)
    alpha = ContextAlpha(D, K)
    nn.init.normal_(alpha.answer[-1].weight)
    twice = torch.cat([key, key[:, :3]], 1), torch.cat([value, value[:, :3]], 1)
    logs = torch.where(torch.arange(N) < 3, math.log(2.0), 0.0).view(1, N)
    assert off(Intention(alpha)(query, key, value, logs), Intention(alpha)(query, *twice)) < 1e-5
    nothing = alpha(torch.zeros(0, D), torch.zeros(0, K))
    assert torch.isfinite(nothing)
    shared = alpha(key[0], value)  # one set of keys for both sets of values
    assert torch.allclose(shared, alpha(key[:1].expand(B, N, D), value))
    many = torch.randn(80000, D + K)
    want = alpha(*many.split([D, K], -1))
    got = alpha.half()(*many.half().split([D, K], -1))  # sums beyond float16
    assert torch.allclose(got, want, rtol=2e-2)
    assert torch.allclose(alpha(*many.half().split([D, K], -1), torch.ones(80000).half()), want, rtol=2e-2)


def test_a_learnable_alpha_in_half_precision_keeps_its_range():
    alpha = LearnableAlpha(covariance="ridge", dtype=torch.float16)
    alpha.theta.data.fill_(14.0)
    assert alpha().item() == pytest.approx(math.exp(14), rel=1e-3)  # beyond float16
    alpha.reset_parameters()
    assert alpha().item() == 1.0


def test_fixed_alphas_are_checked_when_they_come():
    for bad, error in (
        (torch.tensor(-1.0), ValueError),
        (torch.tensor(1), TypeError),
        (torch.tensor([0.1, torch.nan]), ValueError),
    ):
        with pytest.raises(error, match="alpha must"):
            Intention(bad)
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        Intention(torch.tensor(1.5), covariance="convex")
    with pytest.raises(TypeError, match="must not require a gradient"):
        Intention(torch.ones(2, requires_grad=True) * 2)
    with pytest.raises(ValueError, match="covariance must be one of"):
        SigmaIntention(covariance="convx")
    with pytest.raises(TypeError, match="scale must be a number"):
        Attention(scale="variance")
    with pytest.raises(ValueError, match="scale must be finite"):
        Intention(scale=math.nan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_fixed_alpha_keeps_its_precision(dtype):
    """0.999 is 1 in bfloat16, and 1e5 is infinite in float16."""
    query, key, value = points(dtype)
    for alpha in (0.999, 1e5):
        head = Intention(torch.tensor(alpha)).to(dtype)
        assert head.alpha.item() == pytest.approx(alpha)
        assert torch.equal(head(query, key, value), Intention(alpha)(query, key, value))
    assert Intention(torch.tensor(0.3)).to("meta").alpha.is_meta
    assert Intention(torch.tensor(0.3)).double().alpha.dtype == torch.float64


def test_modules_can_be_made_on_a_default_device():
    with torch.device("meta"):
        assert LearnableAlpha(0.3, (2,)).theta.is_meta
        assert ContextAlpha(D, K).answer[-1].bias.is_meta


def test_a_scale_that_would_be_zero_is_refused():
    for alpha in (1.0, torch.tensor([0.5, 1.0])):
        with pytest.raises(ValueError, match="use scale='attention'"):
            Intention(alpha, covariance="convex", scale="output")
        Intention(alpha, covariance="convex", scale="attention")


def test_mixed_dtypes_give_the_wider_one():
    query, key, value = points(torch.float32)
    for head in (Intention(0.3, scale="variance"), SigmaIntention(0.3, scale="variance")):
        assert head(query, key, value.double()).dtype == torch.float64
        assert head(query.bfloat16(), key, value).dtype == torch.float32


def test_w_of_narrow_keys_around_their_mean():
    """Keys around their mean, rounded to float32, have lost a direction of 4e-5."""
    torch.manual_seed(0)
    query, key, value = torch.randn(5, 3), 75 * torch.randn(19, 3), torch.randn(19, 2)
    key[:, 2] = key[:, 0] + 1e-4 * torch.randn(19)
    head = Intention(1e-6, intercept=True)
    out, w = head(query, key, value, return_w=True)
    exact, wanted = head(query.double(), key.double(), value.double(), return_w=True)
    assert off(w.double(), wanted) < 1e-5
    assert off(out.double(), exact) < 1e-5
    assert out.dtype == w.dtype == torch.float32


@pytest.mark.parametrize("kernel", ["gaussian", None])
def test_weights_keep_their_precision_in_half(kernel):
    torch.manual_seed(0)
    query, key, value = (torch.randn(n, 3).bfloat16() for n in (5, 7, 7))
    weight = torch.rand(7)
    bound = {} if kernel else {"constraints": intention.constraints.LinearConstraint(torch.eye(3), -1e3)}
    head = Intention(1.0, kernel=kernel, **bound)
    got = head.fit(key, value, weight=weight)(query.double())
    want = head.fit(key.double(), value.double(), weight=weight.double())(query.double())
    assert off(got, want) < 1e-6


def test_a_named_scale_far_from_0_and_beyond_half_precision():
    """A scale does not round the queries, and w is not rounded before it meets them."""
    torch.manual_seed(0)
    key, query = torch.randn(11, 4) + 6e3, torch.randn(5, 4) + 6e3
    value = torch.randn(11, 3)
    exact = [x.double() for x in (query, key, value)]
    for scale in ("variance", "attention"):
        head = Intention(1e-6, covariance="convex", scale=scale)
        want = head.double()(*exact)
        assert (head.float()(query, key, value).double() - want).norm() < 1e-4 * want.norm()
    key, query, value = (x.half() for x in (torch.randn(11, 13), torch.randn(5, 13), torch.randn(11, 3)))
    head = Intention(1e-6, scale="attention")
    want = 1e6 * head(query.float(), key.float(), value.float())
    out, _ = head(query, key, 1e3 * value, return_w=True)
    assert (1e3 * out.float() - want).norm() < 0.02 * want.norm()
