"""How much a small alpha costs: every rung of the accuracy ladder against alpha = 10 at the same shape.

    python benchmarks/measure/ladder.py                     # one thread, about a minute

Fastest of many calls within one run, in turn. Results go to benchmarks/results/ladder.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

import ops
from intention import functional as F

POINTS = (16, 32, 48, 60, 64, 72, 100, 128, 256)  # d = k = 64, as many queries, 32 heads
ALPHAS = (10.0, 1.0, 0.1, 1e-2, 1e-4)
PADDED = (256, 25, 75, 64, 5)
Timed = dict[str, Callable[[], Any]]


def fastest(calls: Timed, seconds: float) -> dict[str, float]:
    """Seconds of each call: the least over rounds in which every one has its turn, twice, the first not counted."""
    best, end = dict.fromkeys(calls, float("inf")), time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def passes(answer: Callable[..., Any], inputs: list[Tensor], grad: bool) -> Callable[[], Any]:
    if not grad:
        return lambda: answer(*inputs)
    leaves = [x.clone().requires_grad_() for x in inputs]
    upstream = torch.randn_like(answer(*inputs))
    return lambda: torch.autograd.grad(answer(*leaves), leaves, upstream)


def at(alpha: float) -> Callable[..., Any]:
    return lambda query, key, value: F.intention(query, key, value, alpha=alpha)


def alphas(seconds: float) -> list[dict[str, Any]]:
    found = []
    for n in POINTS:
        inputs = ops.make((32, n, n, 64, 64), False)
        query, key, value = inputs
        infos: dict[float, Any] = {a: F.intention(query, key, value, alpha=a, return_info=True)[1] for a in ALPHAS}
        routes = {f"{a:g}": Counter(F.ROUTES[r] for r in i.route.flatten().tolist()) for a, i in infos.items()}
        for grad in (False, True):
            calls: Timed = {"sdpa": passes(TF.scaled_dot_product_attention, inputs, grad)}
            calls |= {f"{alpha:g}": passes(at(alpha), inputs, grad) for alpha in ALPHAS}
            times, label = fastest(calls, seconds), "fwd+bwd" if grad else "fwd"
            ratios = "".join(f"{times[f'{alpha:g}'] / times['10']:8.2f}" for alpha in ALPHAS)
            print(
                f"{n:4d} {label:8s} {times['sdpa'] * 1e3:8.3f} {times['10'] / times['sdpa']:6.2f} {ratios}", flush=True
            )
            found.append({"points": n, "pass": label, "seconds": times, "routes": routes})
    return found


def padding(seconds: float) -> list[dict[str, Any]]:
    """A third of the points left out, against none."""
    inputs, n = ops.make(PADDED, False), PADDED[1]
    mask = (torch.arange(n) < n - n // 3).expand(*inputs[0].shape[:2], 1, n)
    found = []
    for grad in (False, True):
        calls: Timed = {
            "all": passes(lambda q, k, v: F.intention(q, k, v, attn_mask=torch.ones_like(mask)), inputs, grad),
            "padded": passes(lambda q, k, v: F.intention(q, k, v, attn_mask=mask), inputs, grad),
            "unmasked": passes(lambda q, k, v: F.intention(q, k, v), inputs, grad),
        }
        times, label = fastest(calls, seconds), "fwd+bwd" if grad else "fwd"
        print(f"padded {label:8s}", {name: round(t / times["unmasked"], 2) for name, t in times.items()}, flush=True)
        found.append({"shape": PADDED, "pass": label, "seconds": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each shape and pass")
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {**ops.about(), "padding": padding(args.seconds), "alphas": alphas(args.seconds)}
    path = Path(__file__).parents[1] / "results" / "ladder.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
