"""Hugging Face models that run on Intention: tiny random ones of four families, nothing is downloaded."""

import importlib
import sys
from functools import partial
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

import reference
from intention import functional as F

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache  # noqa: E402

from intention.integrations.transformers import CALLS, REFUSED, register  # noqa: E402
from intention.nn import Intention, SigmaIntention  # noqa: E402

NAMES = ["intention", "sigma_intention"]
DECODERS, ENCODERS = ["llama", "qwen"], ["bert", "vit"]
PROJECTIONS = tuple(f"{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "query", "key", "value"))
LENGTH, VOCABULARY = 7, 37
# large weights: at the usual 0.02 all attention is nearly uniform and a wrong one is hard to tell from a right one
TOKENS = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
DECODER = {**TOKENS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": None}
IMAGE = {"image_size": 12, "patch_size": 4, "num_channels": 3}


def config_of(family, **extra):
    if family == "bert":
        return transformers.BertConfig(**{**TOKENS, **extra})
    if family == "vit":
        tokens = {k: v for k, v in TOKENS.items() if k in transformers.ViTConfig().to_dict()}
        return transformers.ViTConfig(**{**tokens, **IMAGE, **extra})
    if family == "llama":
        return transformers.LlamaConfig(**{**DECODER, **extra})
    if family == "mistral":
        return transformers.MistralConfig(**{**DECODER, "sliding_window": 3, **extra})
    return transformers.Qwen3Config(**{**DECODER, "head_dim": 10, **extra})


def build(family, name, seed=0, dtype=torch.float32, **extra):
    """A model in eval mode; the seed makes its parameters, whatever its attention."""
    torch.manual_seed(seed)
    auto = transformers.AutoModel if family in ENCODERS else transformers.AutoModelForCausalLM
    return auto.from_config(config_of(family, **extra), attn_implementation=name).eval().to(dtype)


def tokens(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length))


def inputs_of(family, batch=2, dtype=torch.float32):
    if family == "vit":
        return {"pixel_values": torch.randn(batch, 3, 12, 12, dtype=dtype)}
    return {"input_ids": tokens(batch)}


def output(model, **inputs):
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def direction(out):
    """A loss that the last norm of a model cannot make constant."""
    return torch.linspace(-1, 1, out.shape[-1])


def padding(lengths, side):
    """(batch, LENGTH) of 0 and 1, and the positions of the real tokens in their own sequence."""
    place = torch.arange(LENGTH)
    real = torch.stack([place < n if side == "right" else place >= LENGTH - n for n in lengths]).long()
    return real, (real.cumsum(-1) - 1).clamp_min(0)


def call_of(name):
    return AttentionInterface()[name]


def attention_module(**config):
    return SimpleNamespace(training=False, is_causal=True, config=SimpleNamespace(**config))


def draw(heads=6, shared=2, queries=5, keys=5, d=3, k=4, dtype=torch.float64):
    shapes = (heads, queries, d), (shared, keys, d), (shared, keys, k)
    return [torch.randn(2, *shape, dtype=dtype) for shape in shapes]


@pytest.fixture(autouse=True)
def registered():
    register(alpha=0.7)


@pytest.fixture
def recorded(monkeypatch):
    """Every call of a registered function: (query, key, value, attention_mask, output)."""
    calls = []

    def record(inner, module, query, key, value, mask, **kwargs):
        out, weights = inner(module, query, key, value, mask, **kwargs)
        calls.append((query, key, value, mask, out))
        return out, weights

    for name in NAMES:
        monkeypatch.setitem(AttentionInterface._global_mapping, name, partial(record, call_of(name)))
    return calls


# ---------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("family", "padded"), [("vit", False), *product(["bert", *DECODERS], [False, True])])
def test_every_layer_is_the_formula(name, family, padded, recorded):
    model = build(family, name, dtype=torch.float64)
    inputs = inputs_of(family, dtype=torch.float64)
    if padded:
        inputs["attention_mask"], _ = padding([4, LENGTH], "right")
    output(model, **inputs)
    assert len(recorded) == model.config.num_hidden_layers
    for query, key, value, _, out in recorded:
        want = getattr(reference, name)(
            *(x.double() for x in (query, key, value)),
            mask=inputs["attention_mask"][:, None, None, :].bool() if padded else None,
            causal=family in DECODERS,
            alpha=0.7,
            scale=0.7 * query.shape[-1] ** -0.5,
            gqa=family in DECODERS,
        )
        assert out.shape == (2, query.shape[2], 6, query.shape[3])
        torch.testing.assert_close(out, want.transpose(1, 2).to(out.dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ENCODERS + DECODERS)
def test_outputs_and_gradients(name, family):
    inputs = inputs_of(family)
    gradients = {}
    for attention in ("sdpa", name):
        model = build(family, attention)
        out = output(model, **inputs)
        assert out.isfinite().all()
        (out * direction(out)).mean().backward()
        gradients[attention] = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert gradients[name].keys() == gradients["sdpa"].keys()
    for key, gradient in gradients[name].items():
        assert gradient.isfinite().all(), key
        if key.endswith(PROJECTIONS):
            assert gradient.abs().max() > 1e-6, key


@pytest.mark.parametrize("family", ENCODERS + DECODERS)
def test_large_alpha_is_the_model_itself(family):
    inputs = inputs_of(family, dtype=torch.float64)
    want = output(build(family, "sdpa", dtype=torch.float64), **inputs)
    errors = []
    for alpha in (1e4, 1e5, 1e6):
        got = output(build(family, "sigma_intention", dtype=torch.float64, intention_alpha=alpha), **inputs)
        errors.append((got - want).abs().max().item())
    assert errors[0] < 0.05
    for coarse, fine in pairwise(errors):  # error ~ 1 / alpha; the norms of decoders are in float32
        assert fine < 0.11 * coarse + 2e-6


@pytest.mark.parametrize("family", ENCODERS + DECODERS)
@pytest.mark.parametrize("alpha", [1e6, 1e8])
def test_large_alpha_in_float32(family, alpha):
    inputs = inputs_of(family)
    want = output(build(family, "sdpa"), **inputs)
    got = output(build(family, "sigma_intention", intention_alpha=alpha), **inputs)
    torch.testing.assert_close(got, want, atol=500 / alpha + 2e-5, rtol=0)


@pytest.mark.parametrize("family", ENCODERS + DECODERS)
def test_convex_alpha_1_is_the_model_itself(family):
    register(alpha=1.0, covariance="convex")
    inputs = inputs_of(family)
    want = output(build(family, "sdpa"), **inputs)
    torch.testing.assert_close(output(build(family, "sigma_intention"), **inputs), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_large_alpha_is_linear_attention(causal):
    query, key, value = draw()
    want = F.linear_attention(query, key, value, is_causal=causal, scale=0.5, enable_gqa=True).transpose(1, 2)
    errors = []
    for alpha in (1e4, 1e6):
        module = attention_module(intention_alpha=alpha)
        got, weights = call_of("intention")(module, query, key, value, None, scaling=0.5, is_causal=causal)
        assert weights is None
        errors.append((got - want).abs().max().item())
    assert errors[0] < 1e-2
    assert errors[1] < 0.011 * errors[0]


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("family", "side"), [("bert", "right"), *product(DECODERS, ("left", "right"))])
@pytest.mark.parametrize("scale", ["attention", "auto"])
def test_padding_changes_nothing(name, family, side, scale):
    lengths = [4, LENGTH, 2]
    ids = tokens(3)
    real, positions = padding(lengths, side)
    model = build(family, name, intention_scale=scale)
    where = {"position_ids": positions} if family in DECODERS else {}
    together = output(model, input_ids=ids * real, attention_mask=real, **where)
    for i, n in enumerate(lengths):
        alone = output(model, input_ids=ids[i : i + 1, real[i].bool()])
        torch.testing.assert_close(together[i : i + 1, real[i].bool()], alone, atol=2e-4, rtol=1e-4)
        assert alone.shape[1] == n


@pytest.mark.parametrize("name", NAMES)
def test_cross_attention(name):
    """An encoder and a decoder: three kinds of attention, of which the decoder's own alone is causal."""
    sizes = {f"{side}_{x}": n for side in ("encoder", "decoder") for x, n in (("layers", 1), ("ffn_dim", 20))}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "d_model": 12}
    config = transformers.BartConfig(vocab_size=VOCABULARY, init_std=0.3, pad_token_id=0, **sizes, **heads)
    model = transformers.AutoModel.from_config(config, attn_implementation=name).eval()
    ids, answer = tokens(), tokens(length=5)
    real, _ = padding([4, LENGTH], "right")
    together = output(model, input_ids=ids, attention_mask=real, decoder_input_ids=answer)
    alone = output(model, input_ids=ids[:1, :4], decoder_input_ids=answer[:1])
    torch.testing.assert_close(together[:1], alone, atol=1e-4, rtol=1e-4)
    start = output(model, input_ids=ids, attention_mask=real, decoder_input_ids=answer[:, :3])
    torch.testing.assert_close(together[:, :3], start, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", DECODERS)
def test_queries_that_see_nothing(name, family):
    """Left padding under a causal mask: what padded queries give is of no use, but it must not be NaN."""
    real, positions = padding([2, LENGTH], "left")
    model = build(family, name)
    out = output(model, input_ids=tokens(), attention_mask=real, position_ids=positions)
    (out * direction(out)).mean().backward()
    assert out.isfinite().all()
    for key, p in model.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key


@pytest.fixture
def one_fit_per_query(monkeypatch):
    """Counts the calls that are solved query by query."""
    calls, inner = [], F.per_query

    def counted(*args):
        calls.append(args)
        return inner(*args)

    monkeypatch.setattr(F, "per_query", counted)
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_encoders_is_one_fit(name, one_fit_per_query, recorded):
    real, _ = padding([4, LENGTH], "right")
    output(build("bert", name), input_ids=tokens(), attention_mask=real)
    assert [mask.shape for *_, mask, _ in recorded] == [(2, 1, 1, LENGTH)] * 2
    assert not one_fit_per_query


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize(("family", "extra"), [*((x, {}) for x in DECODERS), ("mistral", {"sliding_window": 31})])
def test_padding_of_decoders_is_solved_in_chunks(name, side, family, extra, one_fit_per_query):
    """As the same mask with its triangle written out, in outputs and gradients, but not query by query."""
    real, positions = padding([4, LENGTH], "left" if side == "left" else "right")
    if side == "middle":
        real[1, 2:5] = 0
    whole = real[:, None, None, :].bool() & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    model, ids, found = build(family, name, dtype=torch.float64, **extra), tokens(), []
    for mask in (real, whole):
        model.zero_grad()
        out = output(model, input_ids=ids, attention_mask=mask, position_ids=positions)
        (out * direction(out))[real.bool()].sum().backward()
        found.append((out.detach(), [p.grad for p in model.parameters()]))
        assert len(one_fit_per_query) == (0 if mask is real else 2)
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=1e-5)  # norms are in float32
    assert found[0][0].isfinite().all()
    for got, want in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(got, want, atol=1e-5 * want.abs().max().item() + 1e-9, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_the_first_tokens_of_a_static_cache_are_solved_in_chunks(name, padded, one_fit_per_query):
    model, ids = build("llama", name), tokens()
    real = padding([4, LENGTH], "left")[0] if padded else torch.ones(2, LENGTH, dtype=torch.long)
    want = output(model, input_ids=ids, attention_mask=real)
    past = StaticCache(model.config, max_cache_len=11)
    got = output(model, input_ids=ids, attention_mask=real, past_key_values=past)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert not one_fit_per_query
    more = torch.cat([real, torch.ones(2, 3, dtype=torch.long)], 1)
    output(model, input_ids=tokens(2, 3), attention_mask=more, past_key_values=past)  # behind it, they are not
    assert len(one_fit_per_query) == 2


@pytest.mark.parametrize("name", NAMES)
def test_windows_and_packing_are_solved_query_by_query(name, one_fit_per_query):
    real, _ = padding([4, LENGTH], "left")
    output(build("mistral", name), input_ids=tokens(), attention_mask=real)
    assert len(one_fit_per_query) == 2
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    output(build("llama", name), input_ids=tokens(1), position_ids=positions, use_cache=False)
    assert len(one_fit_per_query) == 4


@pytest.mark.parametrize("name", NAMES)
def test_encoder_models_may_want_the_whole_mask(name):
    masking = transformers.masking_utils
    config = build("bert", name).config
    real, _ = padding([4, LENGTH], "right")
    embeddings = torch.zeros(2, LENGTH, 24)
    mask = masking.create_bidirectional_mask(config, embeddings, real, allow_is_bidirectional_skip=False)
    assert mask.shape == (2, 1, LENGTH, LENGTH)
    assert ((mask == 0) == real[:, None, None, :].bool()).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_masks(name, dtype):
    """A mask of one's own, as models build it: 0, and the lowest number where -inf is meant."""
    model = build("llama", name)
    ids = tokens()
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    seen[1, :, :, :2] = False  # the first two queries of the second sequence see nothing
    lowest = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    want = output(model, input_ids=ids, attention_mask=seen)
    torch.testing.assert_close(output(model, input_ids=ids, attention_mask=lowest), want, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------------------------------- causality


def future_leaks(model, ids, length=LENGTH):
    """How far outputs up to t move when token t + 1 changes, the worst over t; and how far later ones do, the least."""
    before = output(model, input_ids=ids)
    past, future = [], []
    for t in range(length - 1):
        changed = ids.clone()
        changed[:, t + 1] = 3 + (changed[:, t + 1] - 2) % (VOCABULARY - 3)
        moved = (output(model, input_ids=changed) - before).abs()
        past.append(moved[:, : t + 1].max().item())
        future.append(moved[:, t + 1 :].max().item())
    return max(past), min(future)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", DECODERS)
def test_no_leak_from_the_future(name, family):
    past, future = future_leaks(build(family, name), tokens())
    assert past < 1e-5
    assert future > 1e-2


def test_minus_infinity_on_scores_would_leak(monkeypatch):
    """Why the mask must enter Sigma: the same test fails for a softmax masked after a fit on all keys."""

    def leaky(module, query, key, value, mask, scaling=None, **_):
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        sigma = key.mT @ key + 0.7 * torch.eye(key.shape[-1])
        scores = 0.7 * scaling * torch.linalg.solve(sigma, query, left=False) @ key.mT
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        return out.transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sigma_intention", leaky)
    past, _ = future_leaks(build("llama", "sigma_intention"), tokens())
    assert past > 1e-2


@pytest.mark.parametrize("name", NAMES)
def test_decoders_as_encoders(name):
    model = build("llama", name)
    ids = tokens()
    changed = ids.clone()
    changed[:, -1] = 3 + (ids[:, -1] - 2) % (VOCABULARY - 3)
    both = [output(model, input_ids=x, is_causal=False)[:, 0] for x in (ids, changed)]
    assert (both[0] - both[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_sliding_windows(name):
    model = build("mistral", name, num_hidden_layers=1)
    ids = tokens()
    changed = ids.clone()
    changed[:, 1] = 3 + (ids[:, 1] - 2) % (VOCABULARY - 3)
    moved = (output(model, input_ids=changed) - output(model, input_ids=ids)).abs().amax((0, 2))
    assert moved[1:4].min() > 1e-3  # token 1 is in the windows of queries 1, 2 and 3
    assert moved[4:].max() < 1e-5
    assert moved[0] < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_packed_sequences(name):
    model = build("llama", name)
    first, second = tokens(1, 3), tokens(1, 4)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = output(model, input_ids=torch.cat([first, second], 1), position_ids=positions, use_cache=False)
    apart = torch.cat([output(model, input_ids=x) for x in (first, second)], 1)
    torch.testing.assert_close(packed, apart, atol=1e-4, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------------- caches


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [*DECODERS, "mistral"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("scale", ["attention", "auto"])
def test_generate(name, family, padded, scale):
    model = build(family, name, intention_scale=scale)
    inputs = {"input_ids": tokens()}
    if padded:
        inputs["attention_mask"], _ = padding([4, LENGTH], "left")
    kept, plain = (
        model.generate(
            **inputs,
            max_new_tokens=6,
            do_sample=False,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_logits=True,
        )
        for use_cache in (True, False)
    )
    assert kept.sequences.shape == (2, LENGTH + 6)
    assert (kept.sequences == plain.sequences).all()
    torch.testing.assert_close(torch.stack(kept.logits), torch.stack(plain.logits), atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_several_tokens_behind_a_cache(name, family, cache, padded):
    model = build(family, name)
    ids = tokens()
    real, positions = padding([5, LENGTH], "left") if padded else (None, torch.arange(LENGTH).expand(2, -1))
    full = output(model, input_ids=ids, attention_mask=real, position_ids=positions)
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=11)
    parts = []
    for start, stop in ((0, 3), (3, 6), (6, 7)):
        seen = None if real is None else real[:, :stop]
        parts.append(
            output(
                model,
                input_ids=ids[:, start:stop],
                attention_mask=seen,
                position_ids=positions[:, start:stop],
                past_key_values=past,
            )
        )
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_without_a_mask_queries_are_the_last_ones(name):
    query, key, value = draw(queries=5)
    module, call = attention_module(), call_of(name)
    full, _ = call(module, query, key, value, None)
    for start in (2, 3, 4):
        part, _ = call(module, query[:, :, start:], key, value, None)
        torch.testing.assert_close(part, full[:, start:])


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("name", NAMES)
def test_alpha_of_the_config_goes_first(name):
    inputs = inputs_of("bert")
    register(alpha=3.0)
    model = build("bert", name)
    registered = output(model, **inputs)
    register(alpha=0.2)  # the last one counts, for models that exist too
    other = output(model, **inputs)
    assert (other - registered).abs().max() > 1e-2
    torch.testing.assert_close(output(build("bert", name, intention_alpha=3.0), **inputs), registered)
    model.config.intention_alpha = 3
    torch.testing.assert_close(output(model, **inputs), registered)
    saved = transformers.BertConfig.from_dict(model.config.to_dict())
    assert saved.intention_alpha == 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alpha", [0.4, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]])
def test_scale_auto_is_that_of_the_modules(name, causal, alpha):
    query, key, value = draw()
    register(alpha=alpha, covariance="convex", scale="auto")
    out, _ = call_of(name)(attention_module(), query, key, value, None, is_causal=causal)
    head = SigmaIntention if name == "sigma_intention" else Intention
    scale = "variance" if name == "sigma_intention" else "output"
    wide = (x.repeat_interleave(3, 1) for x in (key, value))
    fixed = torch.tensor(alpha, dtype=query.dtype)
    want = head(fixed, covariance="convex", scale=scale)(query, *wide, is_causal=causal)
    torch.testing.assert_close(out, want.transpose(1, 2))


@pytest.mark.parametrize("name", NAMES)
def test_scale_and_covariance_of_the_config(name):
    query, key, value = draw()
    for settings, options in (
        ({"alpha": 0.4, "scale": None}, {"alpha": 0.4}),
        ({"alpha": 0.4, "scale": 2}, {"alpha": 0.4, "scale": 2}),
        ({"alpha": 0, "scale": 1.5}, {"alpha": 0, "scale": 1.5}),
        ({"alpha": 0.4, "covariance": "convex"}, {"alpha": 0.4, "scale": 0.4 * 3**-0.5, "covariance": "convex"}),
    ):
        config = {f"intention_{k}": v for k, v in settings.items()}
        from_config, _ = call_of(name)(attention_module(**config), query, key, value, None)
        register(**settings)
        from_register, _ = call_of(name)(attention_module(), query, key, value, None)
        want = getattr(F, name)(query, key, value, is_causal=True, enable_gqa=True, **options).transpose(1, 2)
        torch.testing.assert_close(from_config, want)
        torch.testing.assert_close(from_register, want)
        register(alpha=0.7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", [2, 6])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_one_alpha_per_head(name, shared, covariance):
    query, key, value = draw(shared=shared)
    alpha = [0.1, 0.9, 0.3, 0.5, 0.7, 0.2]
    module = attention_module(intention_alpha=alpha, intention_covariance=covariance)
    got, _ = call_of(name)(module, query, key, value, None)
    key, value = (x.repeat_interleave(6 // shared, 1) for x in (key, value))
    for i, a in enumerate(alpha):
        module = attention_module(intention_alpha=a, intention_covariance=covariance)
        head, _ = call_of(name)(module, *(x[:, i : i + 1] for x in (query, key, value)), None)
        torch.testing.assert_close(got[:, :, i : i + 1], head)


@pytest.mark.parametrize("name", NAMES)
def test_one_scale_per_head(name):
    query, key, value = draw()
    scale = [0.1, 2.0, 0.3, 0.5, 0.7, 0.2]
    got, _ = call_of(name)(attention_module(intention_scale=scale), query, key, value, None)
    query = query * torch.tensor(scale, dtype=query.dtype).view(-1, 1, 1)
    want, _ = call_of(name)(attention_module(intention_scale=None), query, key, value, None)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_one_alpha_per_head_in_a_model(family):
    inputs = inputs_of(family)
    want = output(build(family, "sigma_intention", intention_alpha=0.3), **inputs)
    equal = output(build(family, "sigma_intention", intention_alpha=[0.3] * 6), **inputs)
    torch.testing.assert_close(equal, want, atol=1e-4, rtol=1e-4)
    other = output(build(family, "sigma_intention", intention_alpha=[0.3] * 5 + [3.0]), **inputs)
    assert (other - want).abs().max() > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_switching_a_model(name):
    inputs = inputs_of("llama")
    model = build("llama", "sdpa")
    plain = output(model, **inputs)
    model.set_attn_implementation(name)
    torch.testing.assert_close(output(model, **inputs), output(build("llama", name), **inputs))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(output(model, **inputs), plain)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_in_training_only(name):
    # the only dropout of ViT besides `hidden_dropout_prob`
    inputs = inputs_of("vit")
    model = build("vit", name, attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    want = output(build("vit", name, hidden_dropout_prob=0.0), **inputs)
    torch.testing.assert_close(output(model, **inputs), want)
    assert (output(model.train(), **inputs) - want).abs().max() > 1e-3
    query, key, value = draw()
    kept, dropped = (call_of(name)(attention_module(), query, key, value, None, dropout=p)[0] for p in (0.0, 0.5))
    torch.testing.assert_close(kept, dropped)


# -------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ENCODERS + DECODERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, family, dtype):
    inputs = inputs_of(family)
    want = output(build(family, name, initializer_range=0.1), **inputs)
    half = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    model = build(family, name, dtype=dtype, initializer_range=0.1)
    got = output(model, **half)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=0.1 * want.abs().max().item(), rtol=0)
    (got.float() * direction(got)).mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("alpha", [1e6, [1e6] * 6])
@pytest.mark.parametrize("scaling", [None, 3**-0.5, torch.tensor(3**-0.5, requires_grad=True)])
def test_alpha_times_query_may_leave_float16(alpha, scaling):
    query, key, value = draw(dtype=torch.float16)
    module = attention_module(intention_alpha=alpha)
    got, _ = call_of("sigma_intention")(module, query, key, value, None, scaling=scaling)
    assert got.dtype == torch.float16
    want = F.attention(*(x.float() for x in (query, key, value)), is_causal=True, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(got.float(), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_autocast(name, family):
    inputs = inputs_of(family)
    model = build(family, name, initializer_range=0.1)
    want = output(model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        got = output(model, **inputs)
    torch.testing.assert_close(got.float(), want, atol=0.05 * want.abs().max().item(), rtol=0)


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", REFUSED)
def test_what_would_change_the_result_is_refused(name, option):
    query, key, value = draw()
    call, module = call_of(name), attention_module()
    want, _ = call(module, query, key, value, None)
    for nothing in (None, False):
        torch.testing.assert_close(call(module, query, key, value, None, **{option: nothing})[0], want)
    for something in (True, 30.0, torch.ones(6)):
        with pytest.raises(NotImplementedError, match=rf"does not support {option}, got .*: "):
            call(module, query, key, value, None, **{option: something})


def test_models_that_are_refused():
    softcap = transformers.Gemma2Config(**{**DECODER, "head_dim": 4, "attn_logit_softcapping": 30.0})
    sinks = transformers.GptOssConfig(
        **{**DECODER, "head_dim": 4, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": None}
    )
    bias = transformers.T5Config(vocab_size=VOCABULARY, d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=3)
    for config, option in ((softcap, "softcap"), (sinks, "s_aux"), (bias, "position_bias")):
        model = transformers.AutoModel.from_config(config, attn_implementation="sigma_intention").eval()
        inputs = {"decoder_input_ids": tokens()} if option == "position_bias" else {}
        with pytest.raises(NotImplementedError, match=f"does not support {option}"):
            model(input_ids=tokens(), **inputs)
    with pytest.raises(NotImplementedError, match="output_attentions"):
        build("llama", "intention")(tokens(), output_attentions=True)


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_matter_is_ignored(name):
    query, key, value = draw()
    call, module = call_of(name), attention_module()
    want, _ = call(module, query, key, value, None)
    extra = {"position_ids": torch.arange(5), "sliding_window": None, "deterministic": True, "use_cache": True}
    got, _ = call(module, query, key, value, None, cu_seq_lens_q=torch.tensor([0, 5]), **extra)
    torch.testing.assert_close(got, want)
    with pytest.raises(NotImplementedError, match="2 packed sequences without a mask"):
        call(module, query, key, value, None, cu_seq_lens_q=torch.tensor([0, 3, 5]))


@pytest.mark.parametrize("name", NAMES)
def test_masks_that_are_not_masks(name):
    query, key, value = draw()
    for mask in (torch.ones(2, 5, dtype=torch.bool), "causal"):
        with pytest.raises(ValueError, match=r"attention_mask must be a tensor .*got"):
            call_of(name)(attention_module(), query, key, value, mask)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alpha": -1.0}, ValueError, "alpha must be finite and >= 0, got -1"),
        ({"alpha": None}, TypeError, "alpha must be a number, got NoneType"),
        ({"alpha": "1"}, TypeError, "alpha must be a number, got str"),
        ({"alpha": [1.0, True]}, TypeError, "alpha must be a number, got bool"),
        ({"alpha": 2.0, "covariance": "convex"}, ValueError, r"alpha must be in \[0, 1\]"),
        ({"alpha": 0.0}, ValueError, "is 0 at alpha=0; use alpha > 0, or scale=1"),
        ({"covariance": "within"}, ValueError, "covariance must be one of 'ridge', 'convex', got 'within'"),
        ({"scale": "softmax"}, ValueError, "scale must be one of 'attention', 'auto', got 'softmax'"),
        ({"scale": [1.0, None]}, TypeError, "scale must be a number, got NoneType"),
    ],
)
def test_settings_that_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        register(**settings)
    module = attention_module(**{f"intention_{k}": v for k, v in settings.items()})
    with pytest.raises(error, match=message):
        call_of("intention")(module, *draw(), None)


@pytest.mark.parametrize("name", ["alpha", "scale"])
def test_as_many_values_as_heads(name):
    module = attention_module(**{f"intention_{name}": [1.0, 2.0]})
    with pytest.raises(ValueError, match=f"{name} has 2 values but SimpleNamespace has 6 attention heads"):
        call_of("intention")(module, *draw(), None)


def test_both_registries_know_both_names():
    assert set(CALLS) == set(NAMES)
    for name in NAMES:
        assert name in AttentionInterface()
        assert name in AttentionMaskInterface()


def test_without_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "intention.integrations.transformers")
    with pytest.raises(ImportError, match=r'pip install "transformers>=5\.22"'):
        importlib.import_module("intention.integrations.transformers")


# --------------------------------------------------------------------------- models that do not ask for our function


OUTSIDE = {  # they compute attention of their own, and add the mask to its scores
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=37, hidden_size=24, n_layer=2, n_head=6, initializer_range=0.3
    ),
    "megatron": lambda: transformers.MegatronBertConfig(**TOKENS),
    "roformer": lambda: transformers.RoFormerConfig(**TOKENS),
}


@pytest.mark.parametrize("family", OUTSIDE)
@pytest.mark.parametrize("padded", [False, True])
def test_models_with_an_attention_of_their_own_keep_their_masks(family, padded):
    """Neither causality nor padding may get lost because the mask is of a kind that they do not know."""
    auto = transformers.AutoModelForCausalLM if family == "bloom" else transformers.AutoModel
    outs = []
    ids, (real, _) = tokens(), padding([4, LENGTH], "right")
    for name in ("sigma_intention", "eager"):
        torch.manual_seed(0)
        model = auto.from_config(OUTSIDE[family](), attn_implementation=name).eval()
        outs.append(output(model, input_ids=ids, attention_mask=real if padded else None))
    where = real.bool() if padded else torch.ones_like(real).bool()
    torch.testing.assert_close(outs[0][where], outs[1][where])


def test_masks_that_a_model_changes_are_read_again():
    """A model may add to its mask, in place or not; what we know of the mask then no longer holds."""
    masking = transformers.masking_utils
    config = build("llama", "intention").config
    embeddings = torch.zeros(2, 5, 24)
    query, key, value = draw(heads=2, dtype=torch.float32)
    module = attention_module(intention_alpha=0.4, intention_scale=None)

    def made():
        return masking.create_causal_mask(config, embeddings, None, None, torch.arange(5)[None])

    want = F.intention(query, key, value, is_causal=True, alpha=0.4).transpose(1, 2)
    torch.testing.assert_close(call_of("intention")(module, query, key, value, made())[0], want)
    only_self = torch.full((5, 5), -torch.inf).masked_fill(torch.eye(5).bool(), 0.0)
    want = F.intention(query, key, value, torch.eye(5).bool(), alpha=0.4).transpose(1, 2)
    torch.testing.assert_close(call_of("intention")(module, query, key, value, made() + only_self)[0], want)
    changed = made()
    changed += only_self
    torch.testing.assert_close(call_of("intention")(module, query, key, value, changed)[0], want)


def test_a_module_that_does_not_say_is_not_causal():
    query, key, value = draw(heads=2)
    module = SimpleNamespace(training=False, config=SimpleNamespace(intention_scale=None))
    want = F.intention(query, key, value, alpha=0.7).transpose(1, 2)
    torch.testing.assert_close(call_of("intention")(module, query, key, value, None)[0], want)
