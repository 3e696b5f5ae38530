"""A fitted context: updating against refitting, and what leave-one-out costs.

    python benchmarks/measure/context.py

All methods of a row are timed in turn within one run and the medians are compared. Results go to
benchmarks/results/context.json; `python benchmarks/pages/table.py` writes the tables of docs/context.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import intention

SIZES = [(n, d) for d in (16, 64, 256) for n in (64, 256, 1024, 4096, 16384, 65536) if n >= d]
NEW = (1, 32)  # points that come at once
K = 8
ALPHA = 1.0
LEAVE_ONE_OUT = [(1, 1024, 64), (1, 16384, 64), (1, 4096, 256), (64, 256, 32), (256, 25, 640), (1, 100, 4096)]


def medians(calls: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Median seconds of each call: rounds over all of them until the time is up, in each a block of calls.

    The first call of a block pays for the caches of the method before it, and is not counted; calls of more than 20 ms
    do not feel that, and are made once. With one thread its own time counts, not what other programs take meanwhile.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def once(call: Callable[[], Any]) -> float:
        start = clock()
        call()
        return clock() - start

    for call in calls.values():
        call()
    sizes = {name: max(1, min(20, round(20e-3 / once(call)))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or rounds < 3:
        for name, call in calls.items():
            if sizes[name] > 1:
                call()
            times[name] += [once(call) for _ in range(sizes[name])]
        rounds += 1
    return {name: statistics.median(t) for name, t in times.items()}


def update_row(n: int, d: int, seconds: float) -> dict[str, Any]:
    """A context of n points that gets m more, against fitting all of them; each ends with w."""
    gen = torch.Generator().manual_seed(0)
    key, value = torch.randn(n, d, generator=gen), torch.randn(n, K, generator=gen)
    kept = intention.fit(key, value, alpha=ALPHA, intercept=True)
    kept = kept.add(key[:1], value[:1]).remove(key[:1], value[:1])  # has its sums
    sums = kept.without_points()
    calls: dict[str, Callable[[], Any]] = {}
    for m in NEW:
        new = torch.randn(m, d, generator=gen), torch.randn(m, K, generator=gen)
        whole = torch.cat([key, new[0]]), torch.cat([value, new[1]])
        calls[f"refit {m}"] = lambda whole=whole: intention.fit(*whole, alpha=ALPHA, intercept=True).w
        calls[f"add {m}"] = lambda new=new: kept.add(*new).w
        calls[f"add {m}, sums only"] = lambda new=new: sums.add(*new).w
        old = key[:m], value[:m]
        calls[f"remove {m}"] = lambda old=old: kept.remove(*old).w
    return {"n": n, "d": d, "k": K, "seconds": medians(calls, seconds)}


def leave_one_out_row(batch: int, n: int, d: int, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    gen = torch.Generator().manual_seed(0)
    key, value = (torch.randn(batch, n, size, generator=gen).to(dtype) for size in (d, K))

    def fresh(alpha: Any = ALPHA) -> intention.Context:
        return intention.fit(key, value, alpha=alpha, intercept=True)

    def fit_and_leave_one_out() -> None:
        context = fresh()
        context.w  # noqa: B018 - computes
        context.leave_one_out()

    calls = {
        "fit": lambda: fresh().w,
        "fit and leave-one-out": fit_and_leave_one_out,
        "fit with alpha='loo' (28 values)": lambda: fresh("loo").w,
    }
    return {"batch": batch, "n": n, "d": d, "k": K, "dtype": str(dtype), "seconds": medians(calls, seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time per row")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "context.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    updates, errors = [], []
    for n, d in SIZES:
        updates.append(update_row(n, d, args.seconds))
        print(n, d, {k: f"{v * 1e3:.2f} ms" for k, v in updates[-1]["seconds"].items()}, flush=True)
    for shape in LEAVE_ONE_OUT:
        for dtype in (torch.float32, torch.float64):
            errors.append(leave_one_out_row(*shape, dtype, args.seconds))
            print(shape, dtype, {k: f"{v * 1e3:.2f} ms" for k, v in errors[-1]["seconds"].items()}, flush=True)
    result = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "alpha": ALPHA,
        "updates": updates,
        "leave_one_out": errors,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(args.out)


if __name__ == "__main__":
    main()
