"""Layers, stacks, and models whose attention was swapped."""

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from intention.nn import (
    Informer,
    InformerDecoderLayer,
    InformerLayer,
    LearnableAlpha,
    LinTransformer,
    MultiheadAttention,
    MultiheadIntention,
    NPFormer,
    SigmaInformer,
    Transformer,
    swap_attention,
)

E, H, L, B = 12, 2, 7, 3
STACKS = [Informer, SigmaInformer, Transformer, LinTransformer, NPFormer]
MIXERS = ["intention", "sigma_intention", "attention", "linear_attention", "neural_process"]
AS_ATTENTION = {"mixer": "sigma_intention", "alpha": 1.0, "covariance": "convex", "scale": "attention"}


def off(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def padding(lengths=(7, 3, 5)):
    return torch.arange(L) >= torch.tensor(lengths)[:, None]


class Called(Exception):
    pass


def trap(monkeypatch):
    """Our forward raises: what still answers did not call it."""

    def forward(self, *args, **kwargs):
        raise Called

    monkeypatch.setattr(MultiheadIntention, "forward", forward)


# --- torch's fast path ------------------------------------------------------------------------------------------------


def encoders():
    """nn.TransformerEncoder around our layer, around torch's layer with our mixer, and converted afterwards."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 17, batch_first=True)
    converted = nn.TransformerEncoder(copy.deepcopy(layer), 2)  # decides for nested tensors here
    assert converted.use_nested_tensor
    swap_attention(converted, "intention")
    mixed = copy.deepcopy(layer)
    mixed.self_attn = MultiheadIntention.from_attention(layer.self_attn)
    ours = InformerLayer(E, H, 17, batch_first=True)
    ours.load_state_dict(layer.state_dict(), strict=True)
    return {
        "converted": converted,
        "our layer": nn.TransformerEncoder(ours, 2, enable_nested_tensor=False),
        "our mixer": nn.TransformerEncoder(mixed, 2, enable_nested_tensor=False),
    }


@pytest.mark.parametrize("which", ["converted", "our layer", "our mixer"])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "both"])
@pytest.mark.parametrize("grad", [False, True])
def test_in_eval_without_grad_our_forward_is_called(monkeypatch, which, mask, grad):
    """torch's fast path would compute softmax attention from in_proj_weight and never say so."""
    model, x = encoders()[which].eval(), torch.randn(B, L, E)
    masks = {"src_key_padding_mask": padding()} if mask in ("padding", "both") else {}
    if mask in ("causal", "both"):
        masks["mask"] = nn.Transformer.generate_square_subsequent_mask(L)
        masks = {k: torch.where(m, -torch.inf, 0.0) if m.dtype == torch.bool else m for k, m in masks.items()}
    with torch.set_grad_enabled(grad):
        out = model(x, **masks)
        slow = copy.deepcopy(model)
        for layer in slow.layers:
            # hooks keep torch off the fast path
            layer.self_attn.register_forward_hook(lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
        real = ~padding() if "src_key_padding_mask" in masks else torch.ones(B, L, dtype=torch.bool)
        assert off(out[real], slow(x, **masks)[real]) < 1e-5
        trap(monkeypatch)
        with pytest.raises(Called):
            model(x, **masks)


def test_the_test_above_can_fail(monkeypatch):
    """With the flag that torch looks at, the fast path does skip our forward."""
    model, x = encoders()["our mixer"].eval(), torch.randn(B, L, E)
    for layer in model.layers:
        layer.self_attn._qkv_same_embed_dim = True  # pyright: ignore[reportAttributeAccessIssue]
    trap(monkeypatch)
    with torch.no_grad():
        assert torch.isfinite(model(x)).all()


def test_a_converted_encoder_keeps_the_shape_of_padded_batches():
    """Nested tensors would come back shorter than what went in."""
    model = encoders()["converted"].eval()
    short = padding((5, 3, 4))
    with torch.no_grad():
        assert model(torch.randn(B, L, E), src_key_padding_mask=short).shape == (B, L, E)


# --- the layer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(InformerLayer, nn.TransformerEncoderLayer), (InformerDecoderLayer, nn.TransformerDecoderLayer)],
)
def test_the_arguments_begin_as_torchs(ours, theirs):
    want = list(inspect.signature(theirs.__init__).parameters.values())
    got = list(inspect.signature(ours.__init__).parameters.values())
    assert [(p.name, p.default) for p in got[: len(want)]] == [(p.name, p.default) for p in want]


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", torch.tanh])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mixer", ["attention", "sigma_intention"])
def test_with_attention_it_is_torchs_layer(batch_first, norm_first, activation, bias, mixer):
    common = {"batch_first": batch_first, "norm_first": norm_first, "bias": bias, "dtype": torch.float64}
    common["layer_norm_eps"] = 1e-3
    theirs = nn.TransformerEncoderLayer(E, H, 17, 0.0, activation, **common)
    options = AS_ATTENTION if mixer == "sigma_intention" else {"mixer": mixer}
    ours = InformerLayer(E, H, 17, 0.0, activation, **common, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(B, L, E, dtype=torch.float64)
    hidden = padding()
    if not batch_first:
        x = x.transpose(0, 1)
    for masks in ({}, {"src_key_padding_mask": hidden}, {"src_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}):
        assert off(ours(x, **masks), theirs(x, **masks)) < 1e-9


def test_the_papers_block():
    """O1 = LayerNorm(mix(max(0, e_X(X))) + X), O2 = LayerNorm(e_O(O1) + O1)."""
    layer = InformerLayer(E, H, 17, 0.0, batch_first=True, embed_input=True, dtype=torch.float64)
    x = torch.randn(B, L, E, dtype=torch.float64)
    inside = torch.relu(layer.embed_input(x))
    first = layer.norm1(x + layer.self_attn(inside, inside, inside)[0])
    want = layer.norm2(first + layer.linear2(torch.relu(layer.linear1(first))))
    assert off(layer(x), want) < 1e-12
    layer(x).sum().backward()
    assert layer.embed_input.weight.grad.abs().sum() > 0


def test_a_mixer_of_the_users_own():
    class Mean(nn.Module):
        batch_first = True

        def forward(
            self, query, key, value, attn_mask=None, key_padding_mask=None, need_weights=False, is_causal=False
        ):
            return value.mean(1, keepdim=True).expand_as(query), None

    class Bare(nn.Module):
        def forward(self, query, key, value, **options):
            return value.mean(1, keepdim=True).expand_as(query), None

    x = torch.randn(B, L, E)
    layer = InformerLayer(E, H, 17, 0.0, batch_first=True, mixer=Mean())
    assert layer(x).shape == x.shape
    bare = InformerLayer(E, H, 17, 0.0, batch_first=True, mixer=Bare())
    assert nn.TransformerEncoder(bare, 2, enable_nested_tensor=False).eval()(x).shape == x.shape
    made = InformerLayer(E, H, 17, batch_first=True, mixer=nn.MultiheadAttention)
    assert type(made.self_attn) is nn.MultiheadAttention
    with pytest.raises(TypeError, match="alpha"):
        InformerLayer(E, H, mixer=Mean(), batch_first=True, alpha=0.3)
    with pytest.raises(ValueError, match="batch_first=True and the layer False"):
        InformerLayer(E, H, mixer=Mean())
    with pytest.raises(ValueError, match="'intention', 'sigma_intention'"):
        InformerLayer(E, H, mixer="intension")
    with pytest.raises(TypeError, match="alpha"):
        InformerLayer(E, H, mixer="attention", alpha=0.3)


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_decoder_layer_is_torchs_where_it_is_attention(norm_first):
    common = {"batch_first": True, "norm_first": norm_first, "dtype": torch.float64}
    theirs = nn.TransformerDecoderLayer(E, H, 17, 0.0, **common)
    ours = InformerDecoderLayer(E, H, 17, 0.0, **common, **AS_ATTENTION)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    tgt, memory = torch.randn(B, 5, E, dtype=torch.float64), torch.randn(B, L, E, dtype=torch.float64)
    masks = {"tgt_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "memory_key_padding_mask": padding()}
    assert off(ours(tgt, memory, **masks), theirs(tgt, memory, **masks)) < 1e-9


def test_cross_intention_fits_the_memory():
    layer = InformerDecoderLayer(E, H, 17, 0.0, batch_first=True, mixer="attention", cross_mixer="intention")
    assert isinstance(layer.self_attn, MultiheadAttention)
    assert isinstance(layer.multihead_attn, MultiheadIntention)
    decoder = nn.TransformerDecoder(InformerDecoderLayer(E, H, 17, batch_first=True), 2)
    tgt, memory = torch.randn(B, 5, E), torch.randn(B, L, E, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    decoder(tgt, memory, tgt_mask=mask, memory_key_padding_mask=padding()).sum().backward()
    assert torch.isfinite(memory.grad).all()
    assert (memory.grad[padding()] == 0).all()


# --- stacks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_padded_batch_is_its_items_one_by_one(stack, norm_first):
    """Lengths below and above the width of a head, and one item of nothing but padding."""
    model = stack(E, H, 3, 17, 0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    lengths = [1, 5, 20, 0]
    x = torch.randn(4, 20, E, dtype=torch.float64).requires_grad_()
    hidden = torch.arange(20) >= torch.tensor(lengths)[:, None]
    out = model(x, src_key_padding_mask=hidden)
    for i, n in enumerate(lengths[:3]):
        assert off(out[i, :n], model(x[i : i + 1, :n])[0]) < 1e-8
    out.square().sum().backward()
    assert torch.isfinite(out).all()
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("stack", STACKS)
def test_every_layer_has_parameters_of_its_own(stack):
    model = stack(E, H, 3, 17, batch_first=True)
    weights = [layer.self_attn.in_proj_weight for layer in model.layers]
    assert not torch.equal(weights[0], weights[1])
    model(torch.randn(B, L, E)).square().sum().backward()
    missing = [name for name, p in model.named_parameters() if p.grad is None]
    assert missing == []


def test_layers_do_not_share_an_alpha_that_was_passed_once():
    model = Informer(E, H, 3, alpha=LearnableAlpha(0.2, (H,), "convex"))
    assert len({id(layer.self_attn.alpha.theta) for layer in model.layers}) == 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("stack", STACKS)
def test_the_future_does_not_leak_through_a_stack(stack):
    model = stack(E, H, 2, 17, 0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(B, L, E, dtype=torch.float64)
    moved = x.clone()
    moved[:, 4:] = 1.0
    a, b = model(x, is_causal=True), model(moved, is_causal=True)
    assert torch.allclose(a[:, :4], b[:, :4], atol=1e-10)
    assert not torch.allclose(a[:, 4:], b[:, 4:])
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    assert torch.allclose(a, model(x, mask), atol=1e-9)
    first = stack(E, H, 2, 17, 0.0, dtype=torch.float64)  # sequence first: the mask is made along the sequence
    first.load_state_dict(model.state_dict())
    assert torch.allclose(first(x.transpose(0, 1), is_causal=True).transpose(0, 1), a, atol=1e-9)
    assert torch.allclose(first(x[0], is_causal=True), a[0], atol=1e-9)
    assert torch.allclose(model(x[0], is_causal=True), a[0], atol=1e-9)


@pytest.mark.parametrize("stack", STACKS)
def test_points_have_no_order(stack):
    model = stack(E, H, 2, 17, 0.0, batch_first=True, dtype=torch.float64)
    x, order = torch.randn(B, L, E, dtype=torch.float64), torch.randperm(L)
    assert off(model(x[:, order]), model(x)[:, order]) < 1e-9


@pytest.mark.parametrize("stack", [Informer, SigmaInformer])
@pytest.mark.parametrize("n", [8, 64, 200])
def test_activations_start_within_ten_times_the_transformers(stack, n):
    """12 layers of width 256, both norms; the figure is in the docs."""

    def variances(made, norm_first):
        torch.manual_seed(0)
        model = made(256, 4, 12, 64, batch_first=True, norm_first=norm_first).eval()
        seen = []
        for layer in model.layers:
            layer.register_forward_hook(lambda _m, _i, out: seen.append(out.var()))
        with torch.no_grad():
            model(torch.randn(2, n, 256))
        return torch.stack(seen)

    for norm_first in (False, True):
        ratio = variances(stack, norm_first) / variances(Transformer, norm_first)
        assert (ratio < 10).all()
        assert (ratio > 0.1).all()


@pytest.mark.parametrize("stack", [Informer, SigmaInformer])
def test_a_deep_stack_trains_with_the_defaults(stack):
    """12 layers; a model that mixes nothing stays above 0.5. benchmarks/measure/depth.py: width 256, more seeds."""
    torch.manual_seed(0)
    read, body, answer = nn.Linear(4, 64), stack(64, 4, 12, 128, batch_first=True), nn.Linear(64, 4)
    net = nn.Sequential(read, body, answer)
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3)
    losses = []
    for _ in range(60):
        hidden = torch.randn(8, 1, 4)
        loss = (net(hidden + torch.randn(8, 16, 4)) - hidden).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert torch.isfinite(nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) / 10 < 0.45


# --- conversion -------------------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A vision transformer written with nn.MultiheadAttention."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, E, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, E))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(2))
        self.attn = nn.ModuleList(nn.MultiheadAttention(E, H, batch_first=True) for _ in range(2))
        self.head = nn.Linear(E, 5)

    def forward(self, image):
        x = self.patch(image).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for norm, attn in zip(self.norms, self.attn, strict=True):
            y = norm(x)
            x = x + attn(y, y, y)[0]
        return self.head(x[:, 0])


def models():
    return {
        "encoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 17, batch_first=True), 2), 2),
        "transformer": (nn.Transformer(E, H, 2, 2, 17, batch_first=True), 6),
        "vit": (ViT(), 2),
    }


def call(name, model):
    torch.manual_seed(1)
    if name == "vit":
        return model(torch.randn(B, 3, 8, 8))
    if name == "transformer":
        return model(
            torch.randn(B, L, E),
            torch.randn(B, 5, E),
            src_key_padding_mask=padding(),
            memory_key_padding_mask=padding(),
        )
    return model(torch.randn(B, L, E), src_key_padding_mask=padding()).masked_fill(padding()[..., None], 0)


@pytest.mark.parametrize("name", ["encoder", "transformer", "vit"])
@pytest.mark.parametrize("options", [{"alpha": 1.0, "covariance": "convex"}, {"alpha": 1e7, "covariance": "ridge"}])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own, of the model as it was
def test_at_a_large_alpha_a_converted_model_computes_what_it_did(name, options, training):
    """With its queries rescaled by alpha, in eval and in training (dropout 0)."""
    torch.manual_seed(0)
    model, count = models()[name]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    model.train(training)
    with torch.no_grad():
        want = call(name, model)
        swapped = swap_attention(model, "sigma_intention", scale="attention", **options)
        assert off(call(name, model), want) < 1e-4
    assert len(swapped.changed) == count
    assert swapped.model is model
    assert all(m.training == training for m in model.modules())
    assert not any(type(m) is nn.MultiheadAttention for m in model.modules())


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("name", ["encoder", "transformer", "vit"])
def test_a_converted_model_trains(mixer, name):
    torch.manual_seed(0)
    model, _ = models()[name]
    optimiser = torch.optim.SGD(model.parameters(), 0.1)  # made before, of the same parameters
    before = dict(model.named_parameters())
    swap_attention(model, mixer)
    after = dict(model.named_parameters())
    assert all(after[name] is p for name, p in before.items())
    call(name, model).square().sum().backward()
    used = [p for p in before.values() if p.grad is not None]
    assert len(used) == len(before)
    assert all(torch.isfinite(p.grad).all() for p in used)
    optimiser.step()


def test_conversion_tells_what_it_did_and_what_it_could_not():
    class Fancy(nn.MultiheadAttention):
        pass

    class OwnAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(E, 3 * E)

    shared = nn.MultiheadAttention(E, H)
    hooked = nn.MultiheadAttention(E, H)
    hooked.register_forward_hook(lambda *_: None)
    normed = nn.MultiheadAttention(E, H)
    torch.nn.utils.parametrizations.weight_norm(normed.out_proj)
    model = nn.ModuleDict(
        {
            "a": shared,
            "b": nn.Sequential(shared),
            "fancy": Fancy(E, H),
            "own": OwnAttention(),
            "done": MultiheadIntention(E, H),
            "hooked": hooked,
            "normed": normed,
        }
    )
    swapped = swap_attention(model, "intention", alpha=LearnableAlpha(0.3, (H,), "convex"))
    assert swapped.changed == ("a", "b.0")
    assert model["a"] is model["b"][0]  # pyright: ignore[reportIndexIssue]
    assert set(swapped.skipped) == {"fancy", "own", "done", "hooked", "normed"}
    text = str(swapped)
    assert text.startswith("2 replaced, 5 left alone")
    for part in ("subclass", "own forward computes attention", "already", "hooks", "parametrisation"):
        assert part in text
    alone = swap_attention(nn.MultiheadAttention(E, H))
    assert isinstance(alone.model, MultiheadIntention)
    assert alone.changed == ("",)
    assert "(the model itself)" in str(alone)


def test_what_is_pruned_normed_or_adapted_is_left_alone():
    """Its weight is made by a hook, so a new module would have a random one."""
    x = torch.randn(B, L, E)
    made = []
    for change in (
        lambda m: prune.l1_unstructured(m.out_proj, "weight", 0.3),
        lambda m: prune.l1_unstructured(m, "in_proj_weight", 0.3),
        lambda m: torch.nn.utils.parametrizations.spectral_norm(m.out_proj),
        lambda m: m.out_proj.register_forward_hook(lambda *_: None),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
        lambda m: m.out_proj.register_parameter("bias", None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        lambda m: setattr(m, "forward", lambda *_: None),
    ):
        attention = nn.MultiheadAttention(E, H, batch_first=True)
        change(attention)
        made.append(attention)
    model = nn.ModuleList(made)
    before = [m(x, x, x)[0] for m in made[:1]]
    swapped = swap_attention(model, "sigma_intention")
    assert swapped.changed == ()
    assert len(swapped.skipped) == 9
    assert torch.equal(model[0](x, x, x)[0], before[0])


def test_a_mixer_of_the_users_own_keeps_torch_off_its_fast_path():
    class Mine(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            raise Called

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 17, batch_first=True), 2).eval()
    swap_attention(model, Mine)
    with torch.no_grad(), pytest.raises(Called):
        model(torch.randn(B, L, E))

    class Plus(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            out, weights = super().forward(*args, **kwargs)
            return out + 1, weights

    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 17, batch_first=True), 2).eval()
    plus, x = copy.deepcopy(plain), torch.randn(B, L, E)
    swap_attention(plus, Plus)
    with torch.no_grad():
        assert not torch.allclose(plus(x), plain(x))
        swap_attention(same := copy.deepcopy(plain), nn.MultiheadAttention)
        assert torch.allclose(same(x), plain(x), atol=1e-5)
    with pytest.raises(TypeError, match="lacks in_proj_bias"):
        swap_attention(nn.MultiheadAttention(E, H), lambda *a, **k: nn.Linear(1, 1))
    with pytest.raises(TypeError, match="a MultiheadIntention that exists already"):
        swap_attention(nn.MultiheadAttention(E, H), MultiheadIntention(E, H))


def test_conversion_names_the_parameters_that_are_new():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 2)
    assert swap_attention(copy.deepcopy(model), alpha=0.5).added == ()
    swapped = swap_attention(model)
    assert swapped.added == ("layers.0.self_attn.alpha.theta", "layers.1.self_attn.alpha.theta")
    assert "new         layers.0.self_attn.alpha.theta" in str(swapped)


def test_a_model_without_attention_is_noticed():
    with pytest.warns(UserWarning, match=r"found no nn\.MultiheadAttention in Linear"):
        swap_attention(nn.Linear(2, 2))


def test_a_wrapped_model_is_refused():
    """DDP would not know of a new alpha, and ranks would drift apart."""

    class DistributedDataParallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.MultiheadAttention(E, H)

    with pytest.raises(ValueError, match="call swap_attention first"):
        swap_attention(DistributedDataParallel())


def test_a_mixer_put_in_by_hand_can_be_made_safe_afterwards():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 17, batch_first=True), 2).eval()
    for layer in model.layers:
        layer.self_attn = MultiheadIntention.from_attention(layer.self_attn)
    x = torch.randn(B, L, E)
    assert swap_attention(model).changed == ()
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding()).shape == x.shape


def test_conversion_is_all_or_nothing():
    model = nn.Sequential(nn.MultiheadAttention(E, 3), nn.MultiheadAttention(E, 4))
    with pytest.raises(ValueError, match="one per head"):
        swap_attention(model, "intention", alpha=torch.full((3,), 0.2))
    assert all(type(m) is nn.MultiheadAttention for m in model)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 1)
    for bad in ({"alfa": 1.0}, {"scale": "big"}):
        with pytest.raises((TypeError, ValueError)):
            swap_attention(encoder, "intention", **bad)
    assert encoder.use_nested_tensor
    encoder.layers[0].self_attn.register_forward_hook(lambda *_: None)  # pyright: ignore[reportAttributeAccessIssue]
    swap_attention(encoder)
    assert encoder.use_nested_tensor  # nothing was replaced


def test_conversion_finds_attention_inside_what_is_called_attention():
    class SelfAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(E, H, add_zero_attn=True)

    class AttentionBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attention = SelfAttention()

    model = AttentionBlock()
    swapped = swap_attention(model)
    assert swapped.changed == ("self_attention.inner",)
    assert swapped.skipped == {}
    assert model.self_attention.inner.add_zero_attn


def test_options_of_the_stacks_arrive():
    model = Informer(E, H, 2, 17, 0.3, norm_first=True, layer_norm_eps=1e-3, bias=False, embed_input=True)
    assert all(layer.self_attn.dropout == 0.3 for layer in model.layers)  # pyright: ignore[reportAttributeAccessIssue]
    assert all(layer.embed_input is not None for layer in model.layers)
    assert model.norm.eps == 1e-3
    assert model.norm.bias is None
    assert Informer(E, H, 2).norm is None
    assert Informer(E, H, 2, final_norm=True).norm is not None
    assert Informer(E, H, 2, norm_first=True, final_norm=False).norm is None
    given = torch.zeros(L, L, dtype=torch.bool)
    given[:, 2] = True
    stack = Informer(E, H, 1, 17, 0.0, batch_first=True)
    x = torch.randn(B, L, E)
    assert not torch.allclose(stack(x, given), stack(x, is_causal=True))
    with pytest.raises(TypeError, match="that exists already"):
        InformerDecoderLayer(E, H, mixer=MultiheadIntention(E, H))


def test_conversion_keeps_what_was_frozen_and_where_it_is():
    attention = nn.MultiheadAttention(
        E, H, bias=False, add_bias_kv=True, kdim=5, vdim=4, dropout=0.3, dtype=torch.float64
    )
    attention.k_proj_weight.requires_grad_(False)
    made = swap_attention(attention, "intention").model
    assert not made.k_proj_weight.requires_grad
    assert made.dropout == 0.3
    assert made.alpha.theta.dtype == torch.float64  # pyright: ignore[reportAttributeAccessIssue]
    query, key, value = (torch.randn(L, B, f, dtype=torch.float64) for f in (E, 5, 4))
    assert made(query, key, value)[0].shape == (L, B, E)


def test_nothing_changes_when_the_options_are_wrong():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 2)
    with pytest.raises(TypeError, match="alfa"):
        swap_attention(model, "intention", alfa=1.0)
    with pytest.raises(ValueError, match="mixer must be one of"):
        swap_attention(model, "softmax")
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.layers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_attention(model, "attention")


def test_who_looks_at_the_hidden_units_sees_them_before_the_activation():
    layer, x, seen = InformerLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8), []
    with torch.no_grad():
        want = layer(x)
        layer.linear1.register_forward_hook(lambda *args: seen.append(args[-1]))
        torch.testing.assert_close(layer(x), want, rtol=0, atol=0)
        assert (seen[0] < 0).any()
        layer.linear1 = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        layer.linear2 = torch.nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        kept = x.clone()
        layer._ff_block(x)
    torch.testing.assert_close(x, kept, rtol=0, atol=0)
