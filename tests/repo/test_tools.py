"""What users do with modules besides calling them: compile, export, autocast, copy, save, stack, checkpoint."""

import copy
import io
import pickle
import shutil
import timeit
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import intention
from intention.nn import (
    Attention,
    ContextAlpha,
    Informer,
    InformerDecoderLayer,
    InformerLayer,
    Intention,
    LearnableAlpha,
    LinearAttention,
    LinTransformer,
    MultiheadAttention,
    MultiheadIntention,
    MultiheadLinearAttention,
    MultiheadNeuralProcess,
    NeuralProcess,
    NPFormer,
    SigmaInformer,
    SigmaIntention,
    Transformer,
    mlp,
    swap_attention,
)
from intention.solve.torch_state import compiling

D, K, WIDTH, HEADS = 3, 5, 12, 3  # features of keys and values of a head; of the tokens of a mixer
DYNAMIC = torch.export.Dim.DYNAMIC


def tied(**options):
    embed = mlp(D, 13, 7)
    return Intention(embed_query=embed, embed_key=embed, **options)


def swapped():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 13, 0.0, batch_first=True)
    return swap_attention(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), "sigma_intention").model


class Decoder(nn.Module):
    """A decoder layer as a module of one sequence: it reads the first three tokens and remembers all."""

    def __init__(self):
        super().__init__()
        self.layer = InformerDecoderLayer(WIDTH, HEADS, 13, 0.0, batch_first=True)

    def forward(self, src, mask=None, padding=None):
        return self.layer(src[:, :3], src, memory_key_padding_mask=padding)


class Mixer(nn.Module):
    """A mixer as a module of one sequence, with its map."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer

    def forward(self, src, mask=None, padding=None):
        out, weights = self.mixer(src, src, src, key_padding_mask=padding)
        return out if weights is None else torch.cat([out, weights @ src], -1)


def convex(start=None, shape=()):
    return LearnableAlpha(start, shape, "convex")


SOLVING_HEADS = {
    "fixed": lambda: Intention(0.5),
    "tensor": lambda: Intention(torch.tensor([0.5]), covariance="convex", scale="output"),
    "learnable, tied embeddings": lambda: tied(alpha=LearnableAlpha(0.3)),
    "context": lambda: Intention(ContextAlpha(D, K, 7), embed_value=nn.Linear(K, K)),
    "intercept, embed_w": lambda: Intention(0.5, intercept=True, embed_w=nn.Linear(K, K)),
    "sigma": lambda: SigmaIntention(0.5, intercept=True, embed_key=nn.Linear(D, D)),
    "sigma, learnable, scaled": lambda: SigmaIntention(convex(), covariance="convex", scale="variance"),
    "sigma, context": lambda: SigmaIntention(ContextAlpha(D, K, 7)),
}
OTHER_HEADS = {
    "attention": lambda: Attention(embed_query=nn.Linear(D, D)),
    "linear attention": lambda: LinearAttention(embed_w=nn.Linear(K, K)),
    "neural process": lambda: NeuralProcess(embed_pair=mlp(D + K, 13, 7), embed_output=mlp(D + 7, 13, K)),
}
HEAD = SOLVING_HEADS | OTHER_HEADS
FIRST = {"batch_first": True}
SOLVING_LAYERS = {
    "MultiheadIntention": lambda: Mixer(MultiheadIntention(WIDTH, HEADS, **FIRST)),
    "MultiheadIntention, softmax": lambda: Mixer(MultiheadIntention(WIDTH, HEADS, softmax=True, **FIRST)),
    "MultiheadIntention, context": lambda: Mixer(
        MultiheadIntention(WIDTH, HEADS, alpha=ContextAlpha(4, 4, 7, covariance="convex"), **FIRST)
    ),
    "InformerLayer": lambda: InformerLayer(WIDTH, HEADS, 13, 0.0, **FIRST),
    "InformerDecoderLayer": Decoder,
    "Informer": lambda: Informer(WIDTH, HEADS, 2, 13, 0.0, **FIRST),
    "SigmaInformer": lambda: SigmaInformer(WIDTH, HEADS, 1, 13, 0.0, norm_first=True, embed_input=True, **FIRST),
    "swapped": swapped,
}
OTHER_LAYERS = {
    "MultiheadAttention": lambda: Mixer(MultiheadAttention(WIDTH, HEADS, **FIRST)),
    "MultiheadLinearAttention": lambda: Mixer(MultiheadLinearAttention(WIDTH, HEADS, **FIRST)),
    "MultiheadNeuralProcess": lambda: Mixer(MultiheadNeuralProcess(WIDTH, HEADS, **FIRST)),
    "Transformer": lambda: Transformer(WIDTH, HEADS, 1, 13, 0.0, **FIRST),
    "LinTransformer": lambda: LinTransformer(WIDTH, HEADS, 1, 13, 0.0, **FIRST),
    "NPFormer": lambda: NPFormer(WIDTH, HEADS, 1, 13, 0.0, **FIRST),
}
LAYER = SOLVING_LAYERS | OTHER_LAYERS
EVERY = HEAD | LAYER


def inputs(name, batch=2, points=11, masked=True, dtype=torch.float32):
    """Arguments of a forward, positional: (query, key, value, mask), or (tokens, no mask, padding)."""
    if name in HEAD:
        sizes = ((7, D), (points, D), (points, K))
        mask = torch.arange(points) < torch.arange(points, points - batch, -1)[:, None]  # True = take part
        out = [torch.randn(batch, *size, dtype=dtype) for size in sizes]
        return (*out, mask[:, None]) if masked else tuple(out)
    padding = torch.arange(points) >= torch.arange(points, points - batch, -1)[:, None]  # True = ignore
    tokens = torch.randn(batch, points, WIDTH, dtype=dtype)
    return (tokens, None, padding) if masked else (tokens,)


def dynamic_sizes(name, args):
    """Which dimensions of these arguments are batches and points: {dimension: DYNAMIC} of each."""
    mask = 2 if name in HEAD else 1
    return tuple(None if x is None else {0: DYNAMIC, (mask if x.dtype == torch.bool else 1): DYNAMIC} for x in args)


def gradients(module, out, upstream):
    """Of what a loss would train; embeddings that do not reach the output have none."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    return torch.autograd.grad(out, parameters, upstream, allow_unused=True) if parameters else ()


def same_gradients(module, got, want):
    upstream = torch.randn_like(want)
    for a, b in zip(gradients(module, got, upstream), gradients(module, want, upstream), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# --- torch.compile ----------------------------------------------------------------------------------------------------


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled(module, **options):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(module, fullgraph=True, **options)


# the others are inside these, or differ from a neighbour by what a graph does not show
COMPILED = [
    "tensor",
    "context",
    "intercept, embed_w",
    "sigma, learnable, scaled",
    "neural process",
    "InformerDecoderLayer",
    "SigmaInformer",
    "Transformer",
    "LinTransformer",
    "NPFormer",
    "swapped",
]


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_serves_every_length_and_equals_eager(name):
    """Forward and backward, with padding; 3 items for 3 heads, so that batch and heads cannot be mistaken."""
    module = EVERY[name]()
    fast = compiled(module, backend="aot_eager")
    for batch, points in ((2, 11), (3, 13)):
        args = inputs(name, batch, points)
        for x, sizes in zip(args, dynamic_sizes(name, args), strict=True):
            if x is not None:
                torch._dynamo.mark_dynamic(x, list(sizes))  # an error where one of them is fixed
        got, want = fast(*args), module(*args)
        torch.testing.assert_close(got, want)
        same_gradients(module, got, want)
    assert graphs() == 1


def test_numbers_may_be_dynamic_too():
    """dynamic=True also makes symbols of the numbers that a module holds, such as alpha."""
    module = Intention(0.5)
    fast = compiled(module, backend="aot_eager", dynamic=True)
    for batch, points in ((2, 11), (3, 13)):
        args = inputs("fixed", batch, points, masked=False)
        torch.testing.assert_close(fast(*args), module(*args))
    assert graphs() == 1


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_inductor_equals_eager():
    name = "learnable, tied embeddings"
    module, args = EVERY[name](), inputs(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        got, want = compiled(module)(*args), module(*args)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        same_gradients(module, got, want)


# --- torch.export -----------------------------------------------------------------------------------------------------


def exported(name, module, args, **options):
    return torch.export.export(module, args, dynamic_shapes=dynamic_sizes(name, args), **options)


@pytest.mark.parametrize("name", EVERY)
def test_an_exported_program_serves_other_batches_and_lengths(name):
    module = EVERY[name]().eval()
    program = exported(name, module, inputs(name)).module()
    for batch, points in ((2, 11), (3, 13)):
        args = inputs(name, batch, points)
        torch.testing.assert_close(program(*args), module(*args))


@pytest.mark.parametrize("name", ["tensor", "sigma, learnable, scaled", "MultiheadIntention", "LinTransformer"])
def test_an_exported_program_without_masks(name):
    """Traced with as many items as heads: a batch that was compared with them would be fixed."""
    module = EVERY[name]().eval()
    program = exported(name, module, inputs(name, 3, 11, masked=False), strict=name == "tensor").module()
    args = inputs(name, 2, 13, masked=False)
    torch.testing.assert_close(program(*args), module(*args))


@pytest.mark.parametrize("kind", [Informer, SigmaInformer, LinTransformer])
def test_an_exported_causal_stack_serves_other_lengths(kind):
    module, causal = kind(WIDTH, HEADS, 1, 13, 0.0, batch_first=True), {"is_causal": True}
    sizes = {"src": {0: DYNAMIC, 1: DYNAMIC}, "is_causal": None}
    program = torch.export.export(module, (torch.randn(2, 11, WIDTH),), causal, dynamic_shapes=sizes).module()
    tokens = torch.randn(3, 13, WIDTH)
    torch.testing.assert_close(program(tokens, **causal), module(tokens, **causal))


def test_an_exported_program_can_be_saved_and_loaded():
    name = "sigma, context"
    module = EVERY[name]().eval()
    file = io.BytesIO()
    torch.export.save(exported(name, module, inputs(name)), file)
    file.seek(0)
    args = inputs(name, 3, 13)
    torch.testing.assert_close(torch.export.load(file).module()(*args), module(*args))


def test_an_exported_program_refuses_what_it_was_not_made_for():
    """The form of the solve is chosen by N < d when the program is made."""
    program = exported("fixed", Intention(0.5), inputs("fixed", masked=False)).module()
    with pytest.raises(AssertionError, match="Guard failed"):
        program(*inputs("fixed", points=2, masked=False))


# --- ONNX -------------------------------------------------------------------------------------------------------------

REFUSAL = "ONNX has no operator that factors a matrix"


@pytest.fixture
def exporting_to_onnx(monkeypatch):
    """As inside torch.onnx.export(dynamo=True), which needs onnxscript before it says anything else."""
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)


@pytest.mark.parametrize("name", ["fixed", "sigma, context", "MultiheadIntention", "SigmaInformer", "swapped"])
def test_onnx_is_refused_with_a_reason_and_a_remedy(exporting_to_onnx, name):
    with pytest.raises(RuntimeError, match=f"{REFUSAL}.*export query @ w"):
        torch.export.export(EVERY[name](), inputs(name))


def test_onnx_is_refused_by_the_strict_export_too(exporting_to_onnx):
    """torch.onnx.export tries that next, and a success would end in an error about an operator of ours."""
    with pytest.raises(Exception, match=REFUSAL):
        torch.export.export(Intention(0.5), inputs("fixed"), strict=True)


def test_onnx_is_refused_for_a_program_that_exists(monkeypatch):
    program = torch.export.export(Intention(0.5), inputs("fixed"))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match=REFUSAL):
        program.run_decompositions()


def test_onnx_is_refused_for_a_kernel(exporting_to_onnx):
    with pytest.raises(RuntimeError, match=REFUSAL):
        torch.export.export(Intention(0.5, kernel="gaussian"), inputs("fixed", masked=False))


@pytest.mark.parametrize("name", ["MultiheadIntention", "MultiheadIntention, softmax", "InformerLayer"])
@pytest.mark.parametrize("training", [False, True])
def test_onnx_is_refused_by_the_exporter_that_traces(name, training):
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.simplefilter("ignore")  # it is deprecated, and traces shapes
        with pytest.raises(RuntimeError, match=REFUSAL):
            torch.onnx.export(EVERY[name](), inputs(name, masked=False), io.BytesIO(), dynamo=False)


@pytest.mark.parametrize("name", ["attention", "LinTransformer", "MultiheadNeuralProcess"])
def test_modules_without_a_fit_are_not_refused(exporting_to_onnx, name):
    module, args = EVERY[name](), inputs(name)
    torch.testing.assert_close(torch.export.export(module, args).module()(*args), module(*args))


def test_asking_about_onnx_costs_nothing():
    assert min(timeit.repeat(compiling, number=10_000, repeat=7)) < 1e-6 * 10_000


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_autocast_is_close_to_float32(name):
    """The entries of a layer are rounded to 2^-9 = 0.2%, and a few such roundings add up; solves run in float32."""
    module, args = EVERY[name](), inputs(name)
    want = module(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = module(*args)
    assert (got - want).norm() < 0.02 * want.norm()
    for g in gradients(module, got, torch.ones_like(got)):
        assert g.isfinite().all()


@pytest.mark.parametrize("kind", [Informer, SigmaInformer])
def test_training_under_autocast(kind):
    """Each token learns to say the mean of the others' values."""
    model = kind(WIDTH, HEADS, 4, 29, 0.0, batch_first=True, norm_first=True)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    tokens = torch.randn(5, 11, WIDTH)
    target = (tokens + tokens.roll(1, 1)) / 2
    losses = []
    for _ in range(30):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(tokens) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", EVERY)
def test_modules_of_every_dtype(name, dtype):
    """Compared in float64 with the same rounded parameters and inputs, so the rounding of what is between remains."""
    module, args = EVERY[name]().to(dtype), inputs(name, dtype=dtype)
    got = module(*args)
    assert got.dtype == dtype
    for g in gradients(module, got, torch.ones_like(got)):
        assert g.isfinite().all()
    exact = copy.deepcopy(module).double()
    want = exact(*(x.double() if x is not None and x.is_floating_point() else x for x in args))
    tolerance = {torch.bfloat16: 0.02, torch.float16: 0.002, torch.float64: 1e-12}[dtype]
    assert (got.double() - want).norm() < tolerance * want.norm()


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_copies_compute_the_same(name):
    module, args = EVERY[name](), inputs(name)
    want = module(*args)
    assert torch.equal(copy.deepcopy(module)(*args), want)
    assert torch.equal(pickle.loads(pickle.dumps(module))(*args), want)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = EVERY[name]()
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(*args), want)


def test_tied_embeddings_stay_tied_in_copies():
    for head in (copy.deepcopy(tied()), pickle.loads(pickle.dumps(tied()))):
        assert head.embed_query is head.embed_key
        assert len(list(head.parameters())) == len(list(mlp(D, 13, 7).parameters()))


def test_a_fixed_alpha_is_not_in_the_state_but_moves_with_the_module():
    head = Intention(torch.tensor([0.5, 0.7]), embed_key=nn.Linear(D, D))
    assert set(head.state_dict()) == {"embed_key.weight", "embed_key.bias"}
    assert head.double().alpha.dtype == torch.float64
    assert set(Intention(LearnableAlpha(0.5)).state_dict()) == {"alpha.theta"}


# --- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensor", "learnable, tied embeddings", "context", *list(SOLVING_LAYERS)[:3]])
def test_an_ensemble_is_one_vmap(name):
    """Outputs and gradients of five modules at once, each with its own parameters."""
    modules, args = [EVERY[name]() for _ in range(5)], inputs(name)
    for module in modules:
        for p in module.parameters():
            nn.init.normal_(p, std=0.3)
    parameters, buffers = stack_module_state(modules)
    frame = copy.deepcopy(modules[0])  # torch does not put back the parameters of a module that has two names

    def loss(parameters, buffers):
        return functional_call(frame, (parameters, buffers), args).sin().sum()

    want = torch.stack([module(*args).sin().sum() for module in modules])
    torch.testing.assert_close(vmap(loss)(parameters, buffers), want, rtol=1e-4, atol=1e-4)
    got = vmap(grad(loss))(parameters, buffers)
    for i, module in enumerate(modules):
        own = dict(module.named_parameters())
        expected = torch.autograd.grad(want[i], list(own.values()), retain_graph=True) if own else ()
        for key, g in zip(own, expected, strict=True):
            torch.testing.assert_close(got[key][i], g, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["intercept, embed_w", "MultiheadIntention", "MultiheadIntention, softmax"])
def test_gradients_per_item(name):
    """vmap of grad over the items of a batch, as differential privacy takes it."""
    module, args = EVERY[name](), inputs(name, batch=3, masked=False)
    parameters = dict(module.named_parameters())

    def loss(parameters, *item):
        return functional_call(module, parameters, tuple(x[None] for x in item)).square().sum()

    got = vmap(grad(loss), (None, *(0,) * len(args)))(parameters, *args)
    for i in range(3):
        want = torch.autograd.grad(module(*(x[i : i + 1] for x in args)).square().sum(), list(parameters.values()))
        for key, g in zip(parameters, want, strict=True):
            torch.testing.assert_close(got[key][i], g, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_gradcheck_and_gradgradcheck_of_every_parameter(softmax, weights):
    """torch's fused attention has no second derivative; its math backend has."""
    mixer = MultiheadIntention(4, 2, softmax=softmax, dtype=torch.float64, batch_first=True)
    names, values = zip(*mixer.named_parameters(), strict=True)
    tokens = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False, False, False, False, True]])

    def call(tokens, *values):
        named = dict(zip(names, values, strict=True))
        out, _ = functional_call(mixer, named, (tokens, tokens, tokens, padding, weights))
        return out

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(call, (tokens, *values), fast_mode=True)
        assert torch.autograd.gradgradcheck(call, (tokens, *values), fast_mode=True)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mixer", ["intention", "sigma_intention"])
def test_checkpointing_changes_no_gradient(mixer):
    layer = InformerLayer(WIDTH, HEADS, 13, 0.0, batch_first=True, mixer=mixer)
    tokens = torch.randn(2, 11, WIDTH, requires_grad=True)
    leaves = [tokens, *layer.parameters()]
    want = torch.autograd.grad(layer(tokens).sin().sum(), leaves)
    got = torch.autograd.grad(checkpoint(layer, tokens, use_reentrant=False).sin().sum(), leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_nothing_here_is_scripted():
    """torch.jit is deprecated; torch.export takes its place."""
    for path in Path(intention.__file__).parent.rglob("*.py"):
        assert "torch.jit" not in path.read_text(), path
