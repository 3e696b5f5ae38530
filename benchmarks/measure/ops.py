"""Forward and forward+backward against attention and the code a user would write.

    python benchmarks/measure/ops.py                # the ten shapes at 1 and 2 threads, growth in N, peak memory
    python benchmarks/measure/ops.py --quick        # fewer repetitions: 9 minutes
    python benchmarks/measure/ops.py --quick --only ops --threads 1     # a part of it, the rest kept

Every method of a shape is timed in turn within one run and the medians are compared: these are ratios, not records. The
accuracy ladder and all input checks are on. Results go to benchmarks/results/ops.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

import intention
from intention import functional as F
from intention.solve.native import library

SHAPES = [  # batch * heads, N, M, d, k
    (8, 10, 200, 1000, 1),
    (64, 10, 10, 8, 1),
    (256, 25, 75, 64, 5),
    (1, 25, 75, 8192, 5),
    (512, 128, 128, 64, 64),
    (64, 1024, 1024, 64, 64),
    (8, 4096, 4096, 64, 64),
    (4096, 10, 10, 32, 32),
]
SIGMA_SHAPES = [(64, 1024, 1024, 64, 64), (512, 128, 128, 64, 64)]
# Ratios to SDPA of the best pure-torch prototype (forward, forward+backward): what this code is held to.
REFERENCE = {
    (8, 10, 200, 1000, 1): (0.36, 0.56),
    (64, 10, 10, 8, 1): (0.52, 0.74),
    (256, 25, 75, 64, 5): (0.58, 0.63),
    (1, 25, 75, 8192, 5): (0.71, 0.77),
    (512, 128, 128, 64, 64): (1.6, 0.80),
    (64, 1024, 1024, 64, 64): (0.14, 0.09),
    (8, 4096, 4096, 64, 64): (0.03, 0.02),
    (4096, 10, 10, 32, 32): (1.49, 1.17),
}
ALPHA = 1.0
Call = Callable[[Tensor, Tensor, Tensor], Any]


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


def inverse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    eye = torch.eye(k.shape[-1])
    return q @ torch.linalg.inv(k.mT @ k + ALPHA * eye) @ k.mT @ v


def solved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    eye = torch.eye(k.shape[-1])
    return q @ torch.linalg.solve(k.mT @ k + ALPHA * eye, k.mT @ v)


def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return F.intention(q, k, v, alpha=ALPHA)


def sigma(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return F.sigma_intention(q, k, v, alpha=ALPHA)


def about() -> dict[str, str | None]:
    """What the figures of a run depend on."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    machine = f"{names[0] if names else platform.processor()} ({platform.machine()}, {os.cpu_count()} cores)"
    return {"torch": torch.__version__, "machine": machine, "arch": intention.native_info()["arch"]}


SDPA: Call = TF.scaled_dot_product_attention
METHODS: dict[str, Call] = {
    "sdpa": SDPA,
    "softmax written out": written_out,
    "linear attention": F.linear_attention,
    "inv": inverse,
    "solve": solved,
    "intention": ours,
}


def make(shape: tuple[int, ...], grad: bool) -> list[Tensor]:
    """4-D inputs (B, H, points, features): on 3-D input SDPA takes an unfused path, which would flatter us."""
    batch, n, m, d, k = shape
    heads = 8 if batch % 8 == 0 else 1
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(batch // heads, heads, *s, generator=gen, requires_grad=grad) for s in ((m, d), (n, d), (n, k))]


def once(call: Call, inputs: list[Tensor], upstream: Tensor | None) -> float:
    """Forward and backward, both in the surroundings that a call may ask for (`in_torch`).

    With one thread its own time counts, not what other programs take meanwhile.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with getattr(call, "surroundings", nullcontext)():
        start = clock()
        out = call(*inputs)
        if upstream is not None:
            torch.autograd.grad(out, inputs, upstream)
        return clock() - start


def compare(methods: dict[str, Call], shape: tuple[int, ...], grad: bool, seconds: float) -> dict[str, float]:
    """Median seconds of each method: rounds over all methods, in each a block of calls whose first is not counted.

    The first call after another method pays for that method's cache and heap; users call one thing in a loop.
    """
    inputs = make(shape, grad)
    batch, _, m, _, k = shape
    heads = inputs[0].shape[1]
    upstream = torch.randn(batch // heads, heads, m, k) if grad else None
    rounds = {}
    for name, call in methods.items():
        try:
            rounds[name] = [once(call, inputs, upstream)]
        except RuntimeError as error:  # torch.linalg.inv does this on some machines with 2 threads and d = 1000
            print(f"    {name} raised: {error}")
    methods = {name: methods[name] for name in rounds}
    slow = {name for name, t in rounds.items() if t[0] > 2 * seconds}  # the naive lines take minutes on some shapes
    size = {name: 1 + max(2, min(100, round(20e-3 / t[0]))) for name, t in rounds.items()}
    total = sum(t[0] * size[name] for name, t in rounds.items() if name not in slow)
    repeats = max(5, min(50, math.ceil(seconds / max(total, 1e-6))))
    for name in set(methods) - slow:
        rounds[name].clear()
    for _ in range(repeats):
        for name, call in methods.items():
            if name not in slow:
                rounds[name] += [once(call, inputs, upstream) for _ in range(size[name])][1:]
    return {name: statistics.median(t) for name, t in rounds.items()}


def line(shape: tuple[int, ...], times: dict[str, float], label: str, names: Iterable[str]) -> str:
    base = times["sdpa"]
    cells = "".join(f"{times[n] / base:>11.3f}" if n in times else f"{'raised':>11s}" for n in names if n != "sdpa")
    return f"{shape!s:28s} {label:8s} {base * 1e3:10.3f}{cells}"


def ops(threads: int, seconds: float, only: str | None = None) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    rows = []
    print(f"\n{threads} thread(s): SDPA in ms, the others as multiples of it")
    for methods, shapes in ((METHODS, SHAPES), ({"sdpa": SDPA, "sigma_intention": sigma}, SIGMA_SHAPES)):
        print(
            f"{'(B*H, N, M, d, k)':28s} {'':8s} {'sdpa ms':>10s}"
            + "".join(f"{n[:10]:>11s}" for n in methods if n != "sdpa")
        )
        for shape in shapes:
            if only not in (None, str(shape)):
                continue
            for position, grad in enumerate((False, True)):
                times = compare(methods, shape, grad, seconds)
                label = "fwd+bwd" if grad else "fwd"
                text = line(shape, times, label, methods)
                if "intention" in times:
                    ratio, limit = times["intention"] / times["sdpa"], REFERENCE[shape][position]
                    slack = 1.4 if times["sdpa"] < 1e-3 else 1.15
                    text += f"   reference {limit:.2f} {'ok' if ratio <= limit * slack else 'ABOVE'}"
                elif shape == SIGMA_SHAPES[0]:
                    text += f"   limit 1.15 {'ok' if times['sigma_intention'] <= 1.15 * times['sdpa'] else 'ABOVE'}"
                print(text, flush=True)
                rows.append({"shape": shape, "pass": label, "threads": threads, "seconds": times})
    return rows


def growth(seconds: float) -> list[dict[str, Any]]:
    """N = 64 ... 65,536 at d = 64, one head, as many queries as keys; softmax written out stops at 16,384."""
    torch.set_num_threads(1)
    methods = {
        "sdpa": SDPA,
        "softmax written out": written_out,
        "linear attention": F.linear_attention,
        "intention": ours,
    }
    rows = []
    print("\ngrowth in N at d = 64, 1 thread: SDPA in ms, the others as multiples of it")
    print(f"{'':37s} {'sdpa ms':>10s}" + "".join(f"{n[:10]:>11s}" for n in methods if n != "sdpa"))
    for n in (64, 256, 1024, 4096, 16384, 65536):
        chosen = {k: v for k, v in methods.items() if k != "softmax written out" or n <= 16384}
        for grad in (False, True):
            shape = (1, n, n, 64, 64)
            times = compare(chosen, shape, grad, seconds)
            label = "fwd+bwd" if grad else "fwd"
            print(line(shape, times, label, chosen), flush=True)
            rows.append({"shape": shape, "pass": label, "threads": 1, "seconds": times})
    return rows


def peak_bytes(call: Call, inputs: list[Tensor], upstream: Tensor | None) -> int:
    """Most bytes of tensors alive at once during a call, beyond its inputs (torch's own allocation events)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        out = call(*inputs)
        if upstream is not None:
            torch.autograd.grad(out, inputs, upstream)
    alive = peak = 0
    found: Any = prof.profiler.kineto_results.events()  # type: ignore[union-attr]
    events = [e for e in found if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def memory() -> list[dict[str, Any]]:
    rows = []
    print("\npeak memory beyond the inputs, as a multiple of inputs + output (one head, d = k = 64)")
    print(f"{'N':>8s}{'':>10s}" + "".join(f"{n[:10]:>12s}" for n in ("sdpa", "written", "intention")))
    for n in (1024, 4096, 65536):
        for grad in (False, True):
            inputs = make((1, n, n, 64, 64), grad)
            upstream = torch.randn(1, 1, n, 64) if grad else None
            unit = 4 * sum(x.numel() * x.element_size() for x in inputs) // 3
            chosen = {"sdpa": SDPA, "softmax written out": written_out, "intention": ours}
            if n > 4096:
                chosen.pop("softmax written out")
            peaks = {name: peak_bytes(call, inputs, upstream) for name, call in chosen.items()}
            label = "fwd+bwd" if grad else "fwd"
            cells = "".join(
                f"{peaks[c] / unit:>12.2f}" if c in peaks else f"{'-':>12s}"
                for c in ("sdpa", "softmax written out", "intention")
            )
            print(f"{n:>8d}{label:>10s}{cells}", flush=True)
            rows.append({"n": n, "pass": label, "inputs_and_output_bytes": unit, "peak_bytes": peaks})
    return rows


GROUPS = {
    "products": ("aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addcmul"),
    "LAPACK": ("aten::linalg_cholesky_ex", "aten::_cholesky_solve_helper", "aten::cholesky_inverse", "aten::tril"),
}


def profile() -> list[dict[str, Any]]:
    """Where the time of an Intention call goes in pure torch, by the self time of its operators."""
    torch.set_num_threads(1)
    rows = []
    print("\nwhere the time goes, 1 thread")
    for shape in SHAPES:
        for grad in (False, True):
            inputs = make(shape, grad)
            upstream = torch.randn(*inputs[0].shape[:3], shape[4]) if grad else None
            calls = 3 if shape[1] > 500 else 20
            with library.off():
                once(ours, inputs, upstream)
            activities = [torch.profiler.ProfilerActivity.CPU]
            with library.off(), torch.profiler.profile(activities=activities) as prof:
                for _ in range(calls):
                    once(ours, inputs, upstream)
            spent = {e.key: e.self_cpu_time_total for e in prof.key_averages()}
            total = sum(spent.values())
            share = {group: sum(spent.get(name, 0) for name in names) / total for group, names in GROUPS.items()}
            share["rest"] = 1 - sum(share.values())
            label = "fwd+bwd" if grad else "fwd"
            cells = "".join(f"  {group} {part:4.0%}" for group, part in share.items())
            print(f"{shape!s:28s} {label:8s} {total / calls / 1e3:9.3f} ms{cells}", flush=True)
            rows.append({"shape": shape, "pass": label, "milliseconds": total / calls / 1e3, "share": share})
    return rows


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`old` with rows of the same shape, pass and threads replaced: each row is one comparison within one run."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return (*row["shape"], row["pass"], row["threads"], "sigma_intention" in row["seconds"])

    fresh = {key(row): row for row in new}
    return [fresh.pop(key(row), row) for row in old] + list(fresh.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", choices=["ops", "growth", "memory", "profile"], help="one part, the rest kept")
    parser.add_argument(
        "--shape", help='with --only ops: this shape again, e.g. "(64, 10, 10, 8, 1)"; other rows are kept'
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "ops.json")
    args = parser.parse_args()
    seconds = 0.5 if args.quick else 4.0
    kept = json.loads(args.out.read_text()) if args.only and args.out.exists() else {}
    parts: dict[str, Callable[[], Any]] = {
        "ops": lambda: merged(
            kept.get("ops", []) if args.only else [],
            [row for threads in args.threads for row in ops(threads, seconds, args.shape)],
        ),
        "growth": lambda: growth(seconds / 2),
        "memory": memory,
        "profile": profile,
    }
    result = {**kept, **about(), "intention": intention.__version__, "alpha": ALPHA, "dtype": "float32"}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in [args.only] if args.only else parts:
        result[name] = parts[name]()
        args.out.write_text(json.dumps(result, indent=1) + "\n")  # after each part: a later one may take long
    print(f"\nwritten to {args.out}; `python benchmarks/pages/table.py` puts it into docs")


if __name__ == "__main__":
    main()
