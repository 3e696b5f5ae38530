"""Causal Intention against causal SDPA, and against conjugate gradients as a user would write them.

    python benchmarks/measure/causal.py

One thread, float32, alpha = 1, d = k = 64; heads become fewer as N grows, so that all shapes have as many tokens.
The methods are timed in turn within one run, with the accuracy checks on. Results go to benchmarks/results/causal.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

from context import medians
from intention import CausalState, causal_intention
from intention import functional as F

D = 64
TOKENS = 8192
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
ALPHAS = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4)


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


def memory(steps: int) -> list[dict[str, int]]:
    """What 8 heads hold while tokens come one at a time: bytes of the state, and the peak of the process."""
    state = CausalState.empty(D, D, (8,))
    found = []
    generator = torch.Generator().manual_seed(0)
    marks = {1000, steps // 10, steps}
    with torch.no_grad():
        for t in range(1, steps + 1):
            _, state = state.step(*torch.randn(3, 8, D, generator=generator))
            if t in marks:
                held = state.gram.nbytes + state.cross.nbytes
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                found.append({"tokens": t, "state_bytes": held, "peak_bytes": peak})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each length and pass")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--steps", type=int, default=100_000, help="tokens of the streaming check")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__, "machine": platform.machine()}
    result["memory"] = memory(args.steps)  # first: the peak is that of the process
    print(result["memory"], flush=True)
    result["accuracy"] = accuracy()
    for row in result["accuracy"]:
        print({name: f"{x:.1e}" for name, x in row.items()})
    result["lengths"] = []
    for n in args.lengths:
        row = timed(n, args.seconds)
        result["lengths"].append(row)
        for label in ("fwd", "fwd+bwd"):
            base = row[label]["sdpa"]
            ratios = {name: round(t / base, 3) for name, t in row[label].items() if name != "sdpa"}
            print(f"{n:6d} x {row['heads']:2d} {label:8s} sdpa {base * 1e3:8.2f} ms", ratios, flush=True)
    result["padded"], result["llama"] = padded(args.seconds), language_model(args.seconds)
    for label, times in (*result["padded"].items(), *result["llama"].items()):
        base = next(iter(times.values()))
        print(f"{label:8s} {base * 1e3:8.2f} ms", {name: round(t / base, 3) for name, t in times.items()})
    path = Path(__file__).parents[1] / "results" / "causal.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
