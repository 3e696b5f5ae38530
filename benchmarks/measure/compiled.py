"""Calls under torch.compile against the same calls in eager mode, and against what any compiled operator costs.

    python benchmarks/measure/compiled.py                   # one thread, some minutes; --seconds .2 makes it one

Where an eager call takes a millisecond, the compiled one should take no longer; below that both are mostly the way to
the kernel, and the compiled way is measured by an operator that allocates its results and does nothing else, called
after an eager call: its way, too, begins with the caches as such a call leaves them. Low quantiles within one run.
Results go to benchmarks/results/compiled.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import causal
import ops

CALLS = {"intention": ops.ours, "sigma": ops.sigma, "causal": causal.ours}
SHAPES = {
    "intention": [s for s in ops.SHAPES if s != (8, 4096, 4096, 64, 64)],
    "sigma": ops.SIGMA_SHAPES,
    "causal": [(32, 256, 256, 64, 64), (8, 1024, 1024, 64, 64)],
}


@torch.library.custom_op("benchmark::nothing", mutates_args=())
def nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return value.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("benchmark::nothing_backward", mutates_args=())
def nothing_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


nothing.register_fake(lambda q, k, v: v.new_empty(*q.shape[:-1], v.shape[-1]))
nothing_backward.register_fake(lambda g, q, k, v: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))
nothing.register_autograd(
    lambda ctx, grad: nothing_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def low(times: list[float]) -> float:
    return sorted(times)[len(times) // 5]


def compare(methods: dict[str, ops.Call], shape: tuple[int, ...], grad: bool, seconds: float) -> dict[str, float]:
    """Seconds of each method: blocks of calls in turn, the first of each block not counted. Before each call of
    "nothing" stands one of "eager".
    """
    inputs = ops.make(shape, grad)
    upstream = torch.randn(*inputs[0].shape[:3], shape[4]) if grad else None
    for call in methods.values():
        ops.once(call, inputs, upstream)  # compiles
    size = max(2, min(100, round(20e-3 / ops.once(methods["eager"], inputs, upstream))))
    times: dict[str, list[float]] = {name: [] for name in methods}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["eager"]) < 10:
        for name, call in methods.items():
            for i in range(size + 1):
                if name == "nothing":
                    ops.once(methods["eager"], inputs, upstream)
                took = ops.once(call, inputs, upstream)
                if i:
                    times[name].append(took)
    return {name: low(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each shape and pass")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, shapes in SHAPES.items():
        for shape in shapes:
            torch._dynamo.reset()
            eager = CALLS[name]
            trivial: ops.Call = torch.compile(lambda q, k, v: nothing(q, k, v), dynamic=False)
            methods = {"eager": eager, "compiled": torch.compile(eager, dynamic=False), "nothing": trivial}
            for label, grad in (("fwd", False), ("fwd+bwd", True)):
                seconds = compare(methods, shape, grad, args.seconds)
                ratio, over = seconds["compiled"] / seconds["eager"], seconds["compiled"] - seconds["eager"]
                good = ratio <= 1.1 if seconds["eager"] >= 1e-3 else over <= seconds["nothing"]
                cells = "  ".join(f"{key} {1e3 * value:9.3f}" for key, value in seconds.items())
                print(
                    f"{name:10s} {shape!s:26s} {label:8s} {cells} ms  {ratio:5.2f} {'' if good else 'ABOVE'}",
                    flush=True,
                )
                rows.append({"call": name, "shape": shape, "pass": label, "threads": 1, "seconds": seconds})
    path = Path(__file__).parents[1] / "results" / "compiled.json"
    path.write_text(json.dumps({**ops.about(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
