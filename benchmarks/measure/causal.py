"""Causal Intention against causal SDPA, and against conjugate gradients as a user would write them.

    python benchmarks/measure/causal.py

One thread, float32, alpha = 1, d = k = 64; heads become fewer as N grows, so that all shapes have as many tokens.
Forgetting is timed at shapes of its own, by size, decay, kind of keys and threads, and so are gated layers.
The methods are timed in turn within one run, with the accuracy checks on. Results go to benchmarks/results/causal.json;
with --parts only some are measured again, and the others stay as they are, with the machines that they are from.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

import ops
from context import medians
from intention import CausalState, causal_intention
from intention import functional as F
from intention.nn import GatedIntention
from intention.solve.native import library

D = 64
TOKENS = 8192
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ALPHAS = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4)
FORGETTING = ((1, 16, 1024, 64), (1, 16, 4096, 64), (1, 16, 1024, 32), (1, 32, 256, 16), (1, 8, 8192, 64))
IN_TORCH = (1, 16, 1024, 64)
THREADS = (1, 2)
DECAYS = (0.999, 0.99, 0.9, 0.05)
FADING = 1 - 2**-10  # decay of the streaming check; in float32 it is the same number
KEYS = {"unit": 0.1, "normal": 1.0}  # kind -> alpha
LAYER = (256, 4)  # width and heads
LAYERS = ((8, 512), (2, 2048))  # batch, N
PARTS = ("memory", "accuracy", "lengths", "forgetting", "layers", "padded", "llama")


def inputs(n: int, grad: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = max(1, TOKENS // n)
    return [torch.randn(1, heads, n, D, generator=generator, requires_grad=grad) for _ in range(3)]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return TF.scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return F.intention(q, k, v, is_causal=True, alpha=1.0)


def forgetting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_intention(q, k, v, alpha=1.0, decay=torch.full(k.shape[:-1], 0.99))


def sigma(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return F.sigma_intention(q, k, v, is_causal=True, alpha=1.0)


def conjugate_gradients(q: Tensor, k: Tensor, v: Tensor, alpha: float = 1.0, steps: int = 30) -> Tensor:
    """A_t z_t = q_t for all t at once, with A_t z = alpha z + sum_{s<=t} k_s (k_s z), then o_t = sum (z_t k_s) v_s."""

    def times(x: Tensor) -> Tensor:
        return alpha * x + (x @ k.mT).tril() @ k

    z = torch.zeros_like(q)
    rest = q.clone()
    direction, size = rest.clone(), rest.square().sum(-1, keepdim=True)
    for _ in range(steps):
        moved = times(direction)
        step = size / (direction * moved).sum(-1, keepdim=True).clamp_min(1e-30)
        z, rest = z + step * direction, rest - step * moved
        before, size = size, rest.square().sum(-1, keepdim=True)
        direction = rest + size / before.clamp_min(1e-30) * direction
    return (z @ k.mT).tril() @ v


def timed(n: int, seconds: float) -> dict[str, Any]:
    calls = {"sdpa": sdpa, "intention": ours, "intention, decay 0.99": forgetting, "sigma_intention": sigma}
    if n <= 2048:
        calls["conjugate gradients"] = conjugate_gradients
    own, moving = inputs(n), inputs(n, grad=True)
    upstream = torch.randn(own[2].shape)

    def back(call: Any) -> Any:
        return lambda: torch.autograd.grad(call(*moving), moving, upstream)

    with torch.no_grad():
        forward = medians({name: (lambda call=call: call(*own)) for name, call in calls.items()}, seconds)
    both = medians({name: back(call) for name, call in calls.items() if name != "conjugate gradients"}, seconds)
    return {"n": n, "heads": own[0].shape[1], "fwd": forward, "fwd+bwd": both}


def accuracy(n: int = 512) -> list[dict[str, float]]:
    """The relative error of float32 answers for a range of alpha."""
    rows = []
    for alpha in ALPHAS:
        q, k, v = inputs(n)
        want = causal_intention(q.double(), k.double(), v.double(), alpha=alpha)

        def error(out: Tensor, want: Tensor = want) -> float:
            return float((out.double() - want).norm() / want.norm())

        exact, steps = causal_intention(q, k, v, alpha=alpha), conjugate_gradients(q, k, v, alpha)
        rows.append({"alpha": alpha, "intention": error(exact), "conjugate gradients": error(steps)})
    return rows


PADDINGS = {"left": slice(0, 341), "right": slice(683, 1024), "middle": slice(341, 683)}  # a third of 1,024 tokens


def faded(shape: tuple[int, ...], threads: int, seconds: float, in_torch: bool = False) -> list[dict[str, Any]]:
    """Forgetting at one shape, for all decays and both kinds of keys, and causal SDPA on the same tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    tokens = {"normal": [query, key, value], "unit": [TF.normalize(query, dim=-1), TF.normalize(key, dim=-1), value]}
    upstream = torch.randn(shape, generator=generator)
    calls: dict[str, Callable[..., Tensor]] = {"sdpa": lambda kind, inputs: sdpa(*inputs)}
    for decay in DECAYS:
        decays = torch.full(shape[:-1], decay)
        calls[f"{decay:g}"] = lambda kind, inputs, decays=decays: causal_intention(
            *inputs, alpha=KEYS[kind], decay=decays
        )
    rows = []
    torch.set_num_threads(threads)
    with library.off() if in_torch else nullcontext():
        for kind, own in tokens.items():
            moving = [x.clone().requires_grad_() for x in own]
            with torch.no_grad():
                forward = {name: lambda call=call, own=own, kind=kind: call(kind, own) for name, call in calls.items()}
                found = {"fwd": medians(forward, seconds)}
            both = {
                name: lambda call=call, moving=moving, kind=kind: torch.autograd.grad(
                    call(kind, moving), moving, upstream
                )
                for name, call in calls.items()
            }
            found["fwd+bwd"] = medians(both, seconds)
            about = {"shape": list(shape), "threads": threads, "keys": kind, "alpha": KEYS[kind], "torch": in_torch}
            rows.append({**about, **found})
    torch.set_num_threads(1)
    return rows


def forgotten(seconds: float) -> list[dict[str, Any]]:
    """Every shape with one and two threads; without the compiled kernels at one of them."""
    runs = [(shape, threads, False) for threads in THREADS for shape in FORGETTING]
    rows = []
    for shape, threads, in_torch in (*runs, (IN_TORCH, 1, True)):
        rows += faded(shape, threads, seconds, in_torch)
        for row in rows[-len(KEYS) :]:
            for label in ("fwd", "fwd+bwd"):
                base = row[label]["sdpa"]
                ratios = {name: round(t / base, 3) for name, t in row[label].items() if name != "sdpa"}
                about = f"{shape} {threads} thread(s) {row['keys']}{' torch' * in_torch}"
                print(f"{about} {label:8s} sdpa {base * 1e3:8.2f} ms", ratios, flush=True)
    return rows


def layers(seconds: float) -> list[dict[str, Any]]:
    """A training step of a gated layer (forward, gradients of all weights), and of the same one with SDPA."""
    width, heads = LAYER
    rows = []
    for batch, n in LAYERS:
        generator = torch.Generator().manual_seed(0)
        x, upstream = (torch.randn(batch, n, width, generator=generator) for _ in range(2))
        x.requires_grad_()
        steps = {}
        for mixer in ("attention", "intention"):
            layer = GatedIntention(width, heads, mixer=mixer)
            steps[mixer] = lambda layer=layer, x=x, upstream=upstream: torch.autograd.grad(
                layer(x, need_state=False)[0], [x, *layer.parameters()], upstream
            )
        rows.append({"batch": batch, "n": n, "width": width, "heads": heads, "step": medians(steps, seconds)})
        print(rows[-1], flush=True)
    return rows


def padded(seconds: float) -> dict[str, Any]:
    """16 heads x 1,024 tokens with a third of padding, as attn_mask (B, 1, 1, N); "none" has no mask."""
    own, moving = ([torch.randn(4, 4, 1024, D, requires_grad=grad) for _ in range(3)] for grad in (False, True))
    upstream, masks = torch.randn(own[2].shape), dict[str, Tensor | None](none=None)
    for name, where in PADDINGS.items():
        there = torch.ones(4, 1, 1, 1024, dtype=torch.bool)
        there[..., where] = False
        masks[name] = there

    def answer(inputs: list[Tensor], mask: Tensor | None) -> Any:
        query, key, value = inputs
        return F.intention(query, key, value, mask, is_causal=True)

    def forward(mask: Tensor | None) -> Any:
        return lambda: answer(own, mask)

    def both(mask: Tensor | None) -> Any:
        return lambda: torch.autograd.grad(answer(moving, mask), moving, upstream)

    with torch.no_grad():
        found = {"fwd": medians({name: forward(mask) for name, mask in masks.items()}, seconds)}
    return {**found, "fwd+bwd": medians({name: both(mask) for name, mask in masks.items()}, seconds)}


def language_model(seconds: float, length: int = 256) -> dict[str, Any]:
    """A forward of two layers of Llama (hidden size 256, 4 heads), 2 sequences, a third of one is padding."""
    import transformers

    from intention.integrations.transformers import register

    register()
    names = ("sdpa", "intention", "sigma_intention")
    models, ids = {}, torch.randint(3, 1000, (2, length))
    for name in names:
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4
        )
        models[name] = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    real = torch.ones_like(ids)
    real[0, : length // 3] = 0
    with torch.no_grad():
        return {
            label: medians({name: lambda m=models[name], x=mask: m(ids, attention_mask=x) for name in names}, seconds)
            for label, mask in (("plain", None), ("padded", real))
        }


def memory(steps: int) -> list[dict[str, float]]:
    """What 8 heads hold while tokens come one at a time and fade: bytes of the state, the peak of the process, and the
    error of the latest answer against sums and a solve in float64.
    """
    state = CausalState.empty(D, D, (8,))
    fades = torch.full((8,), FADING)
    gram = cross = torch.zeros(8, D, D, dtype=torch.float64)
    found = []
    generator = torch.Generator().manual_seed(0)
    marks = {steps // 1000, steps // 100, steps // 10, steps}
    with torch.no_grad():
        for t in range(1, steps + 1):
            query, key, value = torch.randn(3, 8, D, generator=generator)
            out, state = state.step(query, key, value, decay=fades)
            query, key, value = (x.double().unsqueeze(1) for x in (query, key, value))
            gram, cross = FADING * gram + key.mT @ key, FADING * cross + key.mT @ value
            if t in marks:
                held = state.gram.nbytes + state.cross.nbytes
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                right = (query @ torch.linalg.solve(gram + torch.eye(D, dtype=torch.float64), cross)).squeeze(1)
                error = float((out - right).norm() / right.norm())
                found.append({"tokens": t, "state_bytes": held, "peak_bytes": peak, "error": error})
    return found


def by_length(lengths: list[int], seconds: float) -> list[dict[str, Any]]:
    rows = []
    for n in lengths:
        rows.append(timed(n, seconds))
        for label in ("fwd", "fwd+bwd"):
            base = rows[-1][label]["sdpa"]
            ratios = {name: round(t / base, 3) for name, t in rows[-1][label].items() if name != "sdpa"}
            print(f"{n:6d} x {rows[-1]['heads']:2d} {label:8s} sdpa {base * 1e3:8.2f} ms", ratios, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each length and pass")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=1_000_000, help="tokens of the streaming check")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="what is measured; the rest stays")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "causal.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}
    machines = result.setdefault("machines", {})
    parts: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory(args.steps),  # first: the peak is that of the process
        "accuracy": accuracy,
        "lengths": lambda: by_length(args.lengths, args.seconds),
        "forgetting": lambda: forgotten(args.seconds),
        "layers": lambda: layers(args.seconds),
        "padded": lambda: padded(args.seconds),
        "llama": lambda: language_model(args.seconds),
    }
    for name in [name for name in parts if name in args.parts]:
        result[name], machines[name] = parts[name](), ops.about()
        if name in ("memory", "accuracy"):
            print(*result[name], sep="\n", flush=True)
        if name in ("padded", "llama"):
            for label, times in result[name].items():
                base = next(iter(times.values()))
                print(f"{label:8s} {base * 1e3:8.2f} ms", {each: round(t / base, 3) for each, t in times.items()})
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
