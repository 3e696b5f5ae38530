"""Compiled kernels against SDPA and against the same calls in torch, and the share of the processor's peak they reach.

    python benchmarks/measure/native.py                     # 1 and 2 threads, many minutes; --seconds .3 makes it 6
    python benchmarks/measure/native.py --only heads --threads 2    # one part, the rest kept

Medians within one run, accuracy ladder and checks on. Results go to benchmarks/results/native.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

import causal
import ops
from intention import native_info
from intention.solve.native import library

# Ratios to SDPA, forward and forward+backward: those of a compiled prototype, and what was aimed at.
GOALS = {
    (8, 10, 200, 1000, 1): ((0.26, 0.59), (0.25, 0.50)),
    (64, 10, 10, 8, 1): ((0.21, 0.34), (0.10, 0.25)),
    (256, 25, 75, 64, 5): ((0.30, 0.44), (0.20, 0.35)),
    (1, 25, 75, 8192, 5): ((1.15, 0.88), (0.50, 0.60)),
    (512, 128, 128, 64, 64): ((0.64, 0.48), (0.50, 0.40)),
    (64, 1024, 1024, 64, 64): ((0.10, 0.07), (0.08, 0.06)),
    (8, 4096, 4096, 64, 64): ((0.025, 0.020), (0.020, 0.016)),
    (4096, 10, 10, 32, 32): ((0.62, 0.54), (0.40, 0.40)),
}
HEADS = (16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)  # N of (4, 8, N, 64), fewer heads from 4096 on
CAUSAL = (256, 1024, 4096, 16384)


def in_torch(call: ops.Call) -> ops.Call:
    """The same call, forward and backward, without the kernels."""

    def same(*inputs: Tensor) -> Any:
        return call(*inputs)

    same.surroundings = library.off  # type: ignore[attr-defined]
    return same


def peak(seconds: float = 0.5) -> float:
    """Floating-point operations per second of one large product."""
    n = 1024
    a, b = torch.randn(n, n), torch.randn(n, n)
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2 * n**3 / best


def work(shape: tuple[int, ...]) -> dict[str, float]:
    """Floating-point operations of a forward, textbook counts: Gram, factor, solve, prediction."""
    batch, n, m, d, k = shape
    if n < d:
        predict = min((n + m) * d * k, m * n * (d + k))
        ours = n * n * d + n**3 / 3 + 2 * n * n * k + 2 * predict
    else:
        ours = n * d * d + 2 * n * d * k + d**3 / 3 + 2 * d * d * k + 2 * m * d * k
    return {"intention": batch * ours, "sdpa": batch * 2.0 * m * n * (d + k)}


def rows(shapes: Any, methods: dict[str, ops.Call], threads: int, seconds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    found = []
    for shape in shapes:
        for grad in (False, True):
            times = ops.compare(methods, shape, grad, seconds)
            label = "fwd+bwd" if grad else "fwd"
            print(f"{threads} {ops.line(shape, times, label, methods)}", flush=True)
            found.append({"shape": shape, "pass": label, "threads": threads, "seconds": times, "flop": work(shape)})
    return found


def one(call: ops.Call) -> dict[str, ops.Call]:
    return {"sdpa": ops.SDPA, "native": call, "torch": in_torch(call)}


def heads(threads: int, seconds: float) -> list[dict[str, Any]]:
    shapes = [(32 if n < 4096 else max(1, 32 * 4096 // n // 8), n, n, 64, 64) for n in HEADS]
    return rows(shapes, one(ops.ours), threads, seconds)


def sequences(threads: int, seconds: float) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    found = []
    for n in CAUSAL:
        count = max(1, 8192 // n)

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return TF.scaled_dot_product_attention(q, k, v, is_causal=True)

        methods = {"sdpa": sdpa, "native": causal.ours, "torch": in_torch(causal.ours)}
        for grad in (False, True):
            times = ops.compare(methods, (count, n, n, 64, 64), grad, seconds)
            label = "fwd+bwd" if grad else "fwd"
            print(f"{threads} causal {ops.line((count, n, n, 64, 64), times, label, methods)}", flush=True)
            found.append({"shape": (count, n, n, 64, 64), "pass": label, "threads": threads, "seconds": times})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[int, float], Any]] = {
        "shapes": lambda threads, seconds: rows(GOALS, one(ops.ours), threads, seconds),
        "sigma": lambda threads, seconds: rows(ops.SIGMA_SHAPES, one(ops.sigma), threads, seconds),
        "heads": heads,
        "causal": sequences,
    }
    parser.add_argument("--seconds", type=float, default=1.5, help="for each shape and pass")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=parts, help="one part, the rest kept")
    args = parser.parse_args()
    info = native_info()
    if not info["native"]:
        raise SystemExit(f"there is nothing to measure: {info['reason']}")
    path = Path(__file__).parents[1] / "results" / "native.json"
    result = json.loads(path.read_text()) if args.only and path.exists() else {}
    result |= {**ops.about(), "peak": result.get("peak", {})}
    result["goals"] = [{"shape": shape, "prototype": goal[0], "aim": goal[1]} for shape, goal in GOALS.items()]
    for threads in args.threads:
        torch.set_num_threads(threads)
        result["peak"][str(threads)] = peak()
    for name in [args.only] if args.only else parts:
        kept = [row for row in result.get(name, []) if row["threads"] not in args.threads]
        result[name] = kept + [row for threads in args.threads for row in parts[name](threads, args.seconds)]
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
