"""MultiheadIntention and its siblings: nn.MultiheadAttention but for what is computed."""

import inspect

import pytest
import torch
from torch import nn

from intention import functional as F
from intention.nn import (
    ContextAlpha,
    InformerDecoderLayer,
    InformerLayer,
    LearnableAlpha,
    MultiheadAttention,
    MultiheadDelta,
    MultiheadIntention,
    MultiheadLinearAttention,
    MultiheadNeuralProcess,
)

E, H, L, S, B = 12, 3, 5, 7, 2
MIXERS = {
    "intention": MultiheadIntention,
    "sigma": lambda *a, **k: MultiheadIntention(*a, softmax=True, **k),
    "attention": MultiheadAttention,
    "linear": MultiheadLinearAttention,
    "process": MultiheadNeuralProcess,
}
# sigma-Intention that is attention exactly
AS_ATTENTION = {"softmax": True, "covariance": "convex", "alpha": 1.0, "scale": "attention"}


def off(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# --- the same as torch ------------------------------------------------------------------------------------------------


def test_the_signatures_begin_as_torchs():
    for name in ("__init__", "forward"):
        want = list(inspect.signature(getattr(nn.MultiheadAttention, name)).parameters.values())
        got = list(inspect.signature(getattr(MultiheadIntention, name)).parameters.values())
        assert [(p.name, p.default) for p in got[: len(want)]] == [(p.name, p.default) for p in want]
        assert all(p.kind == p.KEYWORD_ONLY for p in got[len(want) :])


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 5, "vdim": 4}])
def test_initialisation_and_state_are_torchs(mixer, options):
    torch.manual_seed(3)
    want = nn.MultiheadAttention(E, H, **options).state_dict()
    torch.manual_seed(3)
    got = mixer(E, H, **options).state_dict()
    assert all(torch.equal(got[name], x) for name, x in want.items())
    extra = {name.split(".")[0] for name in set(got) - set(want)}
    assert extra <= {"alpha", "heads"}


CASES = {
    "self": {},
    "one item": {"batched": False},
    "batch first": {"batch_first": True},
    "cross": {"cross": True},
    "cross, batch first": {"cross": True, "batch_first": True},
    "other widths": {"cross": True, "kdim": 5, "vdim": 4},
    "key is value": {"cross": True, "tied": True},
    "no bias": {"bias": False},
    "bias points": {"add_bias_kv": True, "cross": True},
    "zero point": {"add_zero_attn": True},
    "both points, one item": {"add_bias_kv": True, "add_zero_attn": True, "batched": False, "cross": True},
}
MASKS = [
    "none",
    "padding",
    "float padding",
    "rows",
    "float rows",
    "rows per head",
    "both",
    "float both",
    "mixed",
    "causal",
]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("made", [AS_ATTENTION, None], ids=["sigma", "attention"])
@pytest.mark.filterwarnings("ignore:Support for mismatched")  # torch's own, of bool beside float masks
def test_where_it_is_attention_it_is_torchs(case, mask, need_weights, made):
    """Outputs, weights and gradients; every layout, every kind of mask."""
    case = dict(case)
    batched, cross, tied = case.pop("batched", True), case.pop("cross", False), case.pop("tied", False)
    theirs = nn.MultiheadAttention(E, H, **case, dtype=torch.float64)
    ours = (MultiheadAttention if made is None else MultiheadIntention).from_attention(theirs, **(made or {}))
    n = S if cross else L
    query = randn(L, E)
    key, value = (randn(n, case.get("kdim", E)), randn(n, case.get("vdim", E))) if cross else (query, query)
    if batched:
        query, key, value = (
            torch.stack([x, x.flip(0)], 0 if case.get("batch_first") else 1) for x in (query, key, value)
        )
    key = query if not cross else key
    value = key if not cross or tied else value
    padding = torch.zeros(B, n, dtype=torch.bool)
    padding[:, -1] = padding[0, 0] = True
    rows = torch.rand(L, n) < 0.4
    rows[:, 1] = False
    per_head = torch.rand((B if batched else 1) * H, L, n) < 0.4
    per_head[..., 1] = False
    padding = padding if batched else padding[0]
    logs = randn(L, n).masked_fill(rows, -torch.inf)
    float_padding = torch.where(padding, -torch.inf, 0.3 * randn(*padding.shape))
    masks = {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float padding": {"key_padding_mask": float_padding},
        "rows": {"attn_mask": rows},
        "float rows": {"attn_mask": logs},
        "rows per head": {"attn_mask": per_head},
        "both": {"attn_mask": per_head, "key_padding_mask": padding},
        "float both": {"attn_mask": logs, "key_padding_mask": float_padding},
        "mixed": {"attn_mask": logs, "key_padding_mask": padding},
        "causal": {"attn_mask": torch.ones(L, n, dtype=torch.bool).triu(1), "is_causal": True},
    }[mask]
    extra = case.get("add_bias_kv", False) or case.get("add_zero_attn", False)
    if mask == "causal" and extra and not need_weights:
        pytest.skip("torch drops the mask there, and with it the extra points from all but the last queries")
    results = []
    for mixer in (theirs, ours):
        x = [t.detach().clone().requires_grad_() for t in (query, key, value)]
        q = x[0]
        k = q if key is query else x[1]
        v = k if value is key else x[2]
        out, weights = mixer(q, k, v, need_weights=need_weights, **masks)
        grads = torch.autograd.grad(out.square().sum(), [q, *mixer.parameters()], allow_unused=True)
        grads = [g for g in grads if g is not None]
        results.append((out, *(() if weights is None else (weights,)), *grads))
    assert len(results[0]) == len(results[1])
    for want, got in zip(*results, strict=True):
        assert want.shape == got.shape
        assert (want - got).abs().max() < 1e-9
    if need_weights:
        for mixer in (theirs, ours):
            mixer.average = mixer(query, key, value, average_attn_weights=False, **masks)[1]
        assert theirs.average.shape == ours.average.shape
        assert (theirs.average - ours.average).abs().max() < 1e-9  # pyright: ignore[reportOperatorIssue]


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_the_default_is_convex_with_half_and_its_scale(softmax):
    mixer = MultiheadIntention(E, H, batch_first=True, softmax=softmax, dtype=torch.float64)
    x = randn(B, L, E)
    assert torch.equal(mixer.alpha.theta, torch.zeros(H))
    q, k, v = torch.nn.functional.linear(x, mixer.in_proj_weight).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
    scale = 0.5 * (L * (L - 4 - 1) / 4 if L > 6 else 2 * 4**0.5) ** 0.5  # N = 5, d = 4: the bridge
    call = F.sigma_intention if softmax else F.intention
    scale = scale if softmax else scale / L**0.5
    want = mixer.out_proj(call(q, k, v, alpha=0.5, covariance="convex", scale=scale).transpose(1, 2).flatten(-2))
    assert off(mixer(x, x, x)[0], want) < 1e-12


def test_the_weights_are_the_intention_map():
    """Q Sigma^-1 K' may be negative, and its rows need not sum to 1."""
    mixer = MultiheadIntention(E, H, batch_first=True, alpha=0.3, covariance="ridge", scale=None, dtype=torch.float64)
    x = randn(B, L, E)
    out, weights = mixer(x, x, x, average_attn_weights=False)
    q, k, v = torch.nn.functional.linear(x, mixer.in_proj_weight).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in (q, k, v))
    want = q @ torch.linalg.solve(k.mT @ k + 0.3 * torch.eye(4, dtype=q.dtype), k.mT)
    assert weights.shape == (B, H, L, L)
    assert off(weights, want) < 1e-10
    assert (weights < 0).any()
    assert off(mixer(x, x, x)[1], want.mean(1)) < 1e-10
    assert off(out, mixer.out_proj((want @ v).transpose(1, 2).flatten(-2))) < 1e-10
    assert off(out, mixer(x, x, x, need_weights=False)[0]) < 1e-10


@pytest.mark.parametrize("softmax", [False, True])
def test_one_alpha_per_head(softmax):
    x = randn(B, L, E)
    alphas = torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    torch.manual_seed(0)
    mixed = MultiheadIntention(
        E, H, batch_first=True, softmax=softmax, alpha=alphas, covariance="ridge", dtype=torch.float64
    )
    weights = mixed(x, x, x, average_attn_weights=False)[1]
    for head, alpha in enumerate(alphas.tolist()):
        torch.manual_seed(0)
        one = MultiheadIntention(
            E, H, batch_first=True, softmax=softmax, alpha=alpha, covariance="ridge", dtype=torch.float64
        )
        assert off(one(x, x, x, average_attn_weights=False)[1][:, head], weights[:, head]) < 1e-10


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("width", [12, 60])
def test_a_padded_batch_is_its_items_one_by_one(mixer, width):
    """N < d and N > d in one batch; what stands in the padding does not matter, gradients included."""
    mixer = mixer(width, 3, batch_first=True, dtype=torch.float64)
    lengths = [1, 3, 8, 30]
    x = randn(4, 30, width).requires_grad_()
    padding = torch.arange(30) >= torch.tensor(lengths)[:, None]
    out = mixer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    inside = out.masked_fill(padding[..., None], 0)
    (grad,) = torch.autograd.grad(inside.square().sum(), x)
    for i, n in enumerate(lengths):
        item = x[i, :n].detach().clone().requires_grad_()
        alone = mixer(item, item, item, need_weights=False)[0]
        assert off(out[i, :n], alone) < 1e-9
        assert off(grad[i, :n], torch.autograd.grad(alone.square().sum(), item)[0]) < 1e-8
        assert (grad[i, n:] == 0).all()


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("kind", ["padding", "float padding", "rows", "float rows"])
def test_fully_masked_rows_are_zero_and_have_no_nan(mixer, need_weights, kind):
    mixer = mixer(E, H, batch_first=True, dtype=torch.float64)
    x = randn(B, L, E).requires_grad_()
    padding, rows = torch.zeros(B, L, dtype=torch.bool), torch.zeros(L, L, dtype=torch.bool)
    padding[1], rows[2] = True, True
    mask = padding if "padding" in kind else rows
    mask = torch.where(mask, -torch.inf, 0.0).double() if "float" in kind else mask
    name = "key_padding_mask" if "padding" in kind else "attn_mask"
    out, weights = mixer(x, x, x, need_weights=need_weights, **{name: mask})
    hidden = out[1] if "padding" in kind else out[:, 2]
    if not isinstance(mixer, MultiheadNeuralProcess):  # which answers with a network, context or not
        assert torch.equal(hidden, mixer.out_proj.bias.expand_as(hidden))
    if weights is not None:
        assert ((weights[1] if "padding" in kind else weights[:, 2]) == 0).all()
    grads = torch.autograd.grad(out.square().sum(), [x, *mixer.parameters()], allow_unused=True)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in grads if g is not None)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize("padded", [False, True])
def test_the_future_does_not_leak(mixer, padded):
    """In the Gram matrix neither: with -inf on the scores alone, Sigma would still see all keys."""
    mixer = mixer(E, H, batch_first=True, dtype=torch.float64)
    x = randn(B, L, E)
    moved = x.clone()
    moved[:, 3:] = randn(B, 2, E)
    mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.zeros(B, L, dtype=torch.bool)
    padding[0, 1] = padded
    outs = [
        mixer(t, t, t, attn_mask=m, is_causal=hint, key_padding_mask=padding if padded else None, need_weights=False)[0]
        for t, m, hint in ((x, mask, True), (moved, mask, True), (x, mask, False), (moved, mask, False))
    ]
    assert torch.allclose(outs[0][:, :3], outs[1][:, :3], atol=1e-12)
    assert not torch.allclose(outs[0][:, 3:], outs[1][:, 3:])
    assert torch.allclose(outs[0], outs[2], atol=1e-10)
    assert torch.allclose(outs[1], outs[3], atol=1e-10)


@pytest.mark.parametrize("softmax", [False, True])
def test_the_lowest_number_in_a_mask_is_minus_infinity(softmax):
    mixer = MultiheadIntention(E, H, batch_first=True, softmax=softmax, dtype=torch.float64)
    x = randn(B, L, E)
    hidden = torch.arange(L) >= torch.tensor([2, 0])[:, None]
    for lowest in (torch.finfo(torch.float64).min, torch.finfo(torch.float32).min, -torch.inf):
        mask = torch.zeros(B, L, dtype=torch.float32 if lowest == torch.finfo(torch.float32).min else torch.float64)
        out = mixer(x, x, x, key_padding_mask=mask.masked_fill(hidden, lowest))
        for got, want in zip(out, mixer(x, x, x, key_padding_mask=hidden), strict=True):
            assert torch.allclose(got, want, atol=1e-12)


def test_dropout_is_on_in_training_only():
    for softmax in (False, True):
        mixer = MultiheadIntention(E, H, dropout=0.5, batch_first=True, softmax=softmax)
        x = torch.randn(B, 40, E)
        assert not torch.allclose(mixer(x, x, x)[0], mixer(x, x, x)[0])
        mixer.eval()
        assert torch.equal(mixer(x, x, x)[0], mixer(x, x, x)[0])


def test_an_alpha_from_the_context_per_head():
    mixer = MultiheadIntention(E, H, batch_first=True, alpha=ContextAlpha(4, 4, covariance="convex"))
    nn.init.normal_(mixer.alpha.answer[-1].weight)
    x, padding = torch.randn(B, L, E), torch.arange(L) >= torch.tensor([L, 3])[:, None]
    out = mixer(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    assert off(out[1, :3], mixer(*[x[1, :3]] * 3)[0]) < 1e-5
    with pytest.raises(ValueError, match="sees all points"):
        mixer(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.bool))


def test_a_shared_mask_costs_one_fit(monkeypatch):
    """A padding mask is equal for all queries and must not become one fit per query."""

    def fail(*args):
        raise AssertionError("one fit per query")

    monkeypatch.setattr(F, "per_query", fail)
    x, padding = torch.randn(B, L, E), torch.arange(L) >= torch.tensor([L, 3])[:, None]
    for softmax in (False, True):
        mixer = MultiheadIntention(E, H, batch_first=True, softmax=softmax)
        mixer(x, x, x, key_padding_mask=padding)
        mixer(x, x, x, key_padding_mask=torch.where(padding, -torch.inf, 0.0))
        with pytest.raises(AssertionError, match="one fit per query"):
            mixer(x, x, x, attn_mask=torch.zeros(L, L, dtype=torch.bool))


def test_masks_of_two_kinds_together():
    """A bool mask of rows beside a float one of padding, and the other way round."""
    mixer = MultiheadIntention(E, H, batch_first=True, dtype=torch.float64)
    x = randn(B, L, E)
    rows, padding = torch.ones(L, L, dtype=torch.bool).triu(1), torch.arange(L) >= torch.tensor([L, 3])[:, None]
    want = mixer(x, x, x, attn_mask=rows, key_padding_mask=padding)[0]
    for a, p in ((rows, floats(padding)), (floats(rows), padding), (floats(rows), floats(padding))):
        assert torch.allclose(mixer(x, x, x, attn_mask=a, key_padding_mask=p)[0], want, atol=1e-10)


def floats(mask):
    return torch.where(mask, -torch.inf, 0.0).double()


@pytest.mark.parametrize("name", MIXERS)
def test_what_padding_holds_does_not_matter(name):
    """NaN in padded keys and values; weights asked for or not."""
    mixer = MIXERS[name](E, H, batch_first=True, dtype=torch.float64)
    x, padding = randn(B, L, E), torch.arange(L) >= torch.tensor([L, 3])[:, None]
    holes = x.masked_fill(padding[..., None], torch.nan)
    for need_weights in (False, True):
        got = mixer(x, holes, holes, key_padding_mask=padding, need_weights=need_weights)[0]
        want = mixer(x, x, x, key_padding_mask=padding, need_weights=need_weights)[0]
        assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_a_hint_stands_for_the_mask_where_it_does_in_torch(need_weights, padded):
    """A causal mask with log-weights in it, and the hint: torch drops the mask only without padding and weights."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    ours = MultiheadIntention.from_attention(theirs, **AS_ATTENTION)
    x = randn(B, L, E)
    slope = torch.arange(L, dtype=torch.float64)
    bias = -(slope[:, None] - slope).abs().masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), torch.inf)
    options = {"attn_mask": bias, "is_causal": True, "need_weights": need_weights}
    if padded:
        options["key_padding_mask"] = floats(torch.arange(L) >= torch.tensor([L, 3])[:, None])
    assert off(ours(x, x, x, **options)[0], theirs(x, x, x, **options)[0]) < 1e-9


def test_a_causal_hint_and_padding_are_solved_in_chunks(monkeypatch):
    """A bool mask can hold nothing but the triangle, so that padding does not make it one fit per query."""
    mixer = MultiheadIntention(E, H, batch_first=True, dtype=torch.float64)
    x, triangle = randn(B, L, E), torch.ones(L, L, dtype=torch.bool).triu(1)
    padding = torch.arange(L) >= torch.tensor([L, 3])[:, None]
    want = mixer(x, x, x, key_padding_mask=padding, attn_mask=triangle, need_weights=False)[0]
    monkeypatch.setattr(F, "per_query", None)
    got = mixer(x, x, x, key_padding_mask=padding, attn_mask=triangle, need_weights=False, is_causal=True)[0]
    assert off(got, want) < 1e-9


def test_a_covariance_of_the_users_own_sees_the_values():
    """Whether weights are asked for or not."""

    def covariance(key, value, weight):
        return key.mT @ key * (1 + value.square().mean((-2, -1), keepdim=True))

    mixer = MultiheadIntention(E, H, batch_first=True, covariance=covariance, alpha=0.3, dtype=torch.float64)
    x = randn(B, L, E)
    assert off(mixer(x, x, x)[0], mixer(x, x, x, need_weights=False)[0]) < 1e-9


def test_an_expanded_mask_costs_one_fit(monkeypatch):
    mixer, x = MultiheadIntention(E, H, batch_first=True), torch.randn(B, L, E)
    hidden = torch.arange(L) == 1
    want = mixer(x, x, x, key_padding_mask=hidden.expand(B, L))[0]
    monkeypatch.setattr(F, "per_query", None)
    assert torch.allclose(mixer(x, x, x, attn_mask=hidden.expand(L, L))[0], want, atol=1e-6)
    assert torch.allclose(mixer(x, x, x, attn_mask=hidden.expand(B * H, L, L))[0], want, atol=1e-6)


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_dropout_keeps_the_mean(mixer):
    """Half of the points, or of the map's entries, count twice."""
    torch.manual_seed(0)
    layer = mixer(E, H, dropout=0.5, batch_first=True, bias=False)
    plain = mixer(E, H, dropout=0.0, batch_first=True, bias=False)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 64, E).expand(400, 64, E)
    out, want = layer(x, x, x, need_weights=False)[0], plain(x, x, x, need_weights=False)[0]
    assert out.std(0).mean() > 0.02 * want.std()  # it is on
    if not isinstance(layer, MultiheadNeuralProcess | MultiheadIntention):  # which are not linear in it
        assert off(out.mean(0), want[0]) < 0.2


def test_options_of_the_other_mixers_arrive():
    x = randn(B, L, E)
    for mixer, call in ((MultiheadAttention, F.attention), (MultiheadLinearAttention, F.linear_attention)):
        layer = mixer(E, H, batch_first=True, scale=0.7, dtype=torch.float64)
        parts = torch.nn.functional.linear(x, layer.in_proj_weight).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in parts)
        want = layer.out_proj(call(q, k, v, scale=0.7).transpose(1, 2).flatten(-2))
        assert off(layer(x, x, x)[0], want) < 1e-10
    assert MultiheadNeuralProcess(E, H, hidden=5).heads[0].embed_context[0][0].out_features == 5  # pyright: ignore[reportAttributeAccessIssue, reportIndexIssue]


def test_one_projection_serves_self_intention(monkeypatch):
    """query is key is value: one matrix product, batch first or not."""
    linear, calls = torch.nn.functional.linear, []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: calls.append(a[1].shape) or linear(*a))
    x = torch.randn(B, L, E)
    for batch_first in (False, True):
        calls.clear()
        MultiheadIntention(E, H, batch_first=batch_first)(x, x, x)
        assert (3 * E, E) in calls


@pytest.mark.parametrize("extra", [{"add_bias_kv": True}, {"add_zero_attn": True}])
@pytest.mark.parametrize("mixer", [MultiheadIntention, MultiheadAttention])
def test_extra_points_are_seen_by_all_causal_queries(extra, mixer):
    """The hint would hide them, since they come last."""
    mixer = mixer(E, H, batch_first=True, dtype=torch.float64, **extra)
    x, mask = randn(B, L, E), torch.ones(L, L, dtype=torch.bool).triu(1)
    want = mixer(x, x, x, attn_mask=mask, need_weights=False)[0]
    assert torch.equal(mixer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], want)


def test_heads_of_a_neural_process_have_masks_of_their_own():
    mixer = MultiheadNeuralProcess(E, H, batch_first=True, dtype=torch.float64)
    nn.init.eye_(mixer.out_proj.weight)
    x = randn(B, L, E)
    rows = torch.zeros(B, H, L, L, dtype=torch.bool)
    rows[:, 1, :, 2] = True
    plain, masked = mixer(x, x, x)[0], mixer(x, x, x, attn_mask=rows.flatten(0, 1))[0]
    changed = (plain - masked).abs().unflatten(-1, (H, -1)).amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize("softmax", [False, True])
def test_a_bool_mask_beside_float_padding_hides_whole_rows(softmax):
    mixer = MultiheadIntention(E, H, batch_first=True, softmax=softmax, dtype=torch.float64)
    x, rows = randn(B, L, E), torch.zeros(L, L, dtype=torch.bool)
    rows[2] = True
    out = mixer(x, x, x, attn_mask=rows, key_padding_mask=torch.zeros(B, L, dtype=torch.float64))[0]
    assert torch.equal(out[:, 2], mixer.out_proj.bias.expand(B, E))


# --- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 4}, {"add_bias_kv": True}, {"bias": False}])
@pytest.mark.parametrize("prefix", [False, True])
def test_state_of_torch_loads_strictly_and_alpha_keeps_its_start(options, prefix):
    theirs = nn.MultiheadAttention(E, H, **options)
    ours = MultiheadIntention(E, H, **options, alpha=LearnableAlpha(0.2, (H,), "convex"))
    inside = nn.ModuleDict({"deep": nn.Sequential(ours)}) if prefix else ours
    state = {"deep.0." * prefix + name: x for name, x in theirs.state_dict().items()}
    before = dict(state)
    result = inside.load_state_dict(state, strict=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert state.keys() == before.keys()  # what was passed is left as it was
    assert torch.allclose(ours.alpha(), torch.full((H,), 0.2))
    assert all(torch.equal(ours.state_dict()[name], x) for name, x in theirs.state_dict().items())
    # its own state comes back with its alpha
    ours.alpha.theta.data.fill_(3.0)
    again = MultiheadIntention(E, H, **options)
    again.load_state_dict(ours.state_dict(), strict=True)
    assert torch.equal(again.alpha.theta, ours.alpha.theta)


@pytest.mark.parametrize("alpha", [0.3, torch.tensor([0.1, 0.2, 0.3])])
def test_with_a_fixed_alpha_state_loads_back_into_torch(alpha):
    ours, theirs = MultiheadIntention(E, H, alpha=alpha), nn.MultiheadAttention(E, H)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_a_state_that_lacks_something_else_is_still_refused():
    state = nn.MultiheadAttention(E, H).state_dict()
    del state["in_proj_bias"]
    with pytest.raises(RuntimeError, match="in_proj_bias"):
        MultiheadIntention(E, H).load_state_dict(state)
    partial = MultiheadIntention(E, H, alpha=ContextAlpha(4, 4, covariance="convex")).state_dict()
    del partial["alpha.read.0.bias"]
    with pytest.raises(RuntimeError, match=r"alpha\.read\.0\.bias"):
        MultiheadIntention(E, H, alpha=ContextAlpha(4, 4, covariance="convex")).load_state_dict(partial)


def test_from_attention_copies():
    theirs = nn.MultiheadAttention(E, H, dropout=0.2, batch_first=True, dtype=torch.float64).eval()
    theirs.in_proj_bias.requires_grad_(False)
    ours = MultiheadIntention.from_attention(theirs, alpha=0.3)
    assert ours.in_proj_weight is not theirs.in_proj_weight
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)
    assert (ours.training, ours.dropout, ours.batch_first) == (False, 0.2, True)
    assert not ours.in_proj_bias.requires_grad
    assert ours.out_proj.weight.dtype == torch.float64
    with pytest.raises(TypeError, match=r"needs an nn\.MultiheadAttention, got Linear"):
        MultiheadIntention.from_attention(nn.Linear(2, 2))


def test_from_attention_of_a_neural_process_keeps_what_is_there():
    theirs = nn.MultiheadAttention(E, H)
    ours = MultiheadNeuralProcess.from_attention(theirs)
    assert torch.equal(ours.in_proj_weight, theirs.in_proj_weight)


def test_a_module_made_on_meta_gets_its_alpha_with_torchs_weights():
    theirs = nn.MultiheadAttention(E, H)
    ours = MultiheadIntention(E, H, device="meta", alpha=LearnableAlpha(0.2, (H,), "convex"))
    assert ours.alpha.theta.is_meta  # it goes where the module is told to
    ours.load_state_dict(theirs.state_dict(), assign=True)
    assert torch.allclose(ours.alpha(), torch.full((H,), 0.2))
    x = torch.randn(L, B, E)
    assert torch.isfinite(ours(x, x, x)[0]).all()
    ours.alpha.theta.data.fill_(9.0)
    ours._reset_parameters()
    assert torch.allclose(ours.alpha(), torch.full((H,), 0.2))
    fixed = MultiheadIntention(E, H, device="meta", alpha=torch.tensor([0.1, 0.2, 0.3]))
    assert fixed.alpha.is_meta
    assert fixed.to_empty(device="cpu").alpha.tolist() == pytest.approx([0.1, 0.2, 0.3])
    with torch.device("meta"):
        assert MultiheadIntention(E, H).alpha.theta.is_meta


def test_parameters_can_be_reset_and_made_elsewhere():
    mixer = MultiheadIntention(E, H)
    before = mixer.in_proj_weight.clone()
    mixer._reset_parameters()
    assert not torch.equal(before, mixer.in_proj_weight)
    assert not mixer._qkv_same_embed_dim
    empty = MultiheadIntention(E, H, device="meta", dtype=torch.float64)
    assert empty.alpha.theta.device.type == "meta"
    assert empty.alpha.theta.dtype == torch.float64


# --- errors -----------------------------------------------------------------------------------------------------------


def test_bad_calls_are_named():
    mixer, x = MultiheadIntention(E, H, batch_first=True), torch.randn(B, L, E)
    with pytest.raises(RuntimeError, match="generate_square_subsequent_mask"):
        mixer(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"key_padding_mask must have shape \(batch, keys\) = \(2, 5\)"):
        mixer(x, x, x, key_padding_mask=torch.zeros(L, B, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"\(6, 5, 5\)"):
        mixer(x, x, x, attn_mask=torch.zeros(B, L, L, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"use mask\.bool\(\)"):
        mixer(x, x, x, key_padding_mask=torch.zeros(B, L, dtype=torch.int64))
    with pytest.raises(ValueError, match="2x5x9"):
        mixer(x, torch.randn(B, L, 9), x)
    with pytest.raises(ValueError, match="the batch is the second dimension"):
        MultiheadIntention(E, H)(x, torch.randn(3, S, E), torch.randn(3, S, E))
    with pytest.raises(ValueError, match="3 dimensions"):
        mixer(x[None], x[None], x[None])
    with pytest.raises(ValueError, match="enable_nested_tensor=False"):
        mixer(*[torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)] * 3)
    with pytest.raises(ValueError, match=r"shape \(3,\), one per head, got \(2,\)"):
        MultiheadIntention(E, H, alpha=0.5 * torch.ones(2))
    with pytest.raises(ValueError, match=r"shape \(3,\), one per head, got \(2,\)"):
        MultiheadIntention(E, H, alpha=LearnableAlpha(0.2, (2,), "convex"))
    with pytest.raises(ValueError, match=r"\(batch, keys\) = \(2, 5\), got \(5,\)"):
        mixer(x, x, x, key_padding_mask=torch.zeros(L, dtype=torch.bool))
    with pytest.raises(ValueError, match="one-hot"):
        MultiheadIntention(E, H, covariance="within")
    with pytest.raises(TypeError, match="alfa"):
        MultiheadIntention(E, H, alfa=1.0)


def test_heads_share_the_features() -> None:
    message = r"multiple of num_heads, got 30 features for 4 heads; use embed_dim=28 or 32"
    for made in (MultiheadIntention, MultiheadAttention, InformerLayer, InformerDecoderLayer):
        with pytest.raises(ValueError, match=message):
            made(30, 4)
    with pytest.raises(ValueError, match="num_heads must be an integer >= 1, got 0"):
        MultiheadIntention(32, 0)


def test_short_vectors_of_the_delta_rule_have_their_slopes_in_half_precision():
    """A vector of one feature has no direction to change: its slope is 0, and not rounding over its length."""
    torch.manual_seed(0)
    mixer = MultiheadDelta(1, 1, batch_first=True, dtype=torch.bfloat16)
    x = torch.randn(2, 11, 1, dtype=torch.bfloat16) / 30
    mixer.stream(x)[0].sum().backward()
    assert mixer.in_proj_weight.grad[:2].abs().max() < 1e-6 * mixer.in_proj_weight.grad[2].abs()
