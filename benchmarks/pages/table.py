"""Markdown tables from benchmarks/results/*.json, written between markers in the pages of docs/.

python benchmarks/pages/table.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OTHERS = ["softmax written out", "linear attention", "inv", "solve", "intention"]


def rows(result: dict[str, Any], threads: int, method: str) -> dict[tuple[int, ...], dict[str, dict[str, float]]]:
    """shape -> pass -> seconds, for the rows that timed `method`."""
    found: dict[tuple[int, ...], dict[str, dict[str, float]]] = {}
    for row in result["ops"]:
        if row["threads"] == threads and method in row["seconds"]:
            found.setdefault(tuple(row["shape"]), {})[row["pass"]] = row["seconds"]
    return found


def ratio(times: dict[str, float], name: str) -> str:
    if name not in times:
        return "raised"
    value = times[name] / times["sdpa"]
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def short(result: dict[str, Any]) -> str:
    """docs/speed.md: one thread, ratios to SDPA, with the kernels and without."""
    head = ["(batch·heads, N, M, d, k)", "forward / SDPA", "with backward", "forward in pure torch", "with backward"]
    body = []
    for part, name in (("shapes", ""), ("sigma", "σIntention ")):
        found = native_rows(result, part)
        for shape in dict.fromkeys(shape for shape, _ in found):
            passes = [found[shape, label][1]["seconds"] for label in ("fwd", "fwd+bwd")]
            cells = [ratio(times, which) for which in ("native", "torch") for times in passes]
            body.append([f"{name}{shape}", *cells])
    return markdown(head, body)


def full(result: dict[str, Any], threads: int) -> str:
    head = ["shape", "pass", "SDPA ms", *OTHERS]
    body = []
    for shape, passes in rows(result, threads, "intention").items():
        for label, times in passes.items():
            body.append([str(shape), label, f"{times['sdpa'] * 1e3:.2f}", *(ratio(times, name) for name in OTHERS)])
    for shape, passes in rows(result, threads, "sigma_intention").items():
        for label, times in passes.items():
            cells = ["", "", "", "", f"σ {ratio(times, 'sigma_intention')}"]
            body.append([str(shape), label, f"{times['sdpa'] * 1e3:.2f}", *cells])
    return markdown(head, body)


def growth(result: dict[str, Any]) -> str:
    names = ["softmax written out", "linear attention", "intention"]
    body = []
    for row in result["growth"]:
        times = row["seconds"]
        cells = [ratio(times, name) if name in times else "–" for name in names]
        body.append([f"{row['shape'][1]:,}", row["pass"], f"{times['sdpa'] * 1e3:.2f}", *cells])
    return markdown(["N", "pass", "SDPA ms", *names], body)


def memory(result: dict[str, Any]) -> str:
    names = ["sdpa", "softmax written out", "intention"]
    body = []
    for row in result["memory"]:
        peaks = row["peak_bytes"]
        cells = [f"{peaks[n] / row['inputs_and_output_bytes']:.2f}" if n in peaks else "–" for n in names]
        body.append([f"{row['n']:,}", row["pass"], *cells])
    return markdown(["N", "pass", *names], body)


def profile(result: dict[str, Any]) -> str:
    body = []
    for row in result["profile"]:
        shares = [f"{row['share'][group]:.0%}" for group in ("products", "LAPACK", "rest")]
        body.append([str(tuple(row["shape"])), row["pass"], f"{row['milliseconds']:.2f}", *shares])
    return markdown(["shape", "pass", "ms", "matrix products", "LAPACK", "everything else"], body)


def updates(result: dict[str, Any]) -> str:
    """Time of a refit over time of an update."""
    ways = ["add 1", "add 32", "add 1, sums only", "add 32, sums only", "remove 1", "remove 32"]
    body = []
    for row in result["updates"]:
        times = row["seconds"]
        cells = [times[f"refit {way.split(',')[0].split()[1]}"] / times[way] for way in ways]
        body.append([str(row["d"]), f"{row['n']:,}", f"{times['refit 1'] * 1e3:.2f}", *(f"{c:.1f}" for c in cells)])
    return markdown(["d", "N", "refit ms", *ways], body)


def leave_one_out(result: dict[str, Any]) -> str:
    ways = ["fit and leave-one-out", "fit with alpha='loo' (28 values)"]
    body = []
    for row in result["leave_one_out"]:
        times, shape = row["seconds"], (row["batch"], row["n"], row["d"])
        dtype = row["dtype"].removeprefix("torch.")
        cells = [f"{times[way] / times['fit']:.2f}" for way in ways]
        body.append([str(shape), dtype, f"{times['fit'] * 1e3:.2f}", *cells])
    return markdown(["(batch, N, d)", "dtype", "fit ms", *(f"{way} / fit" for way in ways)], body)


STACKS = [  # model, scale, how the pages call it
    ("Transformer", "default", "Transformer"),
    ("SigmaInformer", "default", "σInformer"),
    ("SigmaInformer", "none", "σInformer, unscaled"),
    ("Informer", "default", "Informer"),
    ("Informer", "variance", 'Informer, scale="variance"'),
    ("Informer", "none", "Informer, unscaled"),
    ("LinTransformer", "default", "LinTransformer"),
    ("NPFormer", "default", "NPFormer"),
]


def depth_rows(result: list[dict[str, Any]], kind: str, **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in result if row["kind"] == kind and all(row[k] == v for k, v in wanted.items())]


def activations(result: list[dict[str, Any]]) -> str:
    """The largest ratio to the Transformer over the layers, of what a layer gives; each N, each norm."""
    body = []
    for norm_first in (False, True):
        for n in sorted({row["n"] for row in depth_rows(result, "activations")}):
            rows = {
                (row["model"], row["scale"]): row["layer_variance"]
                for row in depth_rows(result, "activations", n=n, norm_first=norm_first)
            }
            base = rows["Transformer", "default"]
            cells = []
            for model, scale, _ in STACKS[1:]:
                worst = max((a / b for a, b in zip(rows[model, scale], base, strict=True)), key=lambda r: max(r, 1 / r))
                cells.append(f"{worst:,.0f}" if worst >= 100 else f"{worst:.2f}")
            body.append(["pre" if norm_first else "post", str(n), f"{base[-1]:.2f}", *cells])
    return markdown(["norm", "N", "Transformer, layer 12", *(name for *_, name in STACKS[1:])], body)


def training(result: list[dict[str, Any]]) -> str:
    """Mean loss of the first 10 and the last 50 steps, its range over seeds, and the gradient at the end."""
    body = []
    for model, scale, name in STACKS:
        sizes = sorted({(r["n"], r["layers"]) for r in depth_rows(result, "training", model=model, scale=scale)})
        for n, layers in sizes:
            rows = depth_rows(result, "training", model=model, scale=scale, layers=layers, n=n)
            last = [sum(row["loss"][-5:]) / 5 for row in rows]
            spread = f" ({min(last):.2f}–{max(last):.2f})" if len(last) > 1 else ""
            first = sum(row["loss"][0] for row in rows) / len(rows)
            gradient = sum(row["gradient"][1] for row in rows) / len(rows)
            verdict = "yes" if max(last) < 0.5 else "no" if min(last) >= 0.5 else "some seeds"
            verdict = verdict if all(row["finite"] for row in rows) else "not finite"
            reached = f"{sum(last) / len(last):.2f}{spread}"
            body.append([name, str(layers), str(n), f"{first:.2f}", reached, f"{gradient:.1f}", verdict])
    head = ["stack", "layers", "N", "loss, steps 1–10", "steps 151–200 (range over seeds)", "gradient", "mixes"]
    return markdown(head, body)


def modules(result: dict[str, Any]) -> str:
    """Seconds of a layer over those of nn.TransformerEncoderLayer."""
    names = ["attention", "sigma_intention", "intention"]
    body = []
    for row in result["layers"]:
        times = row["seconds"]
        cells = [f"{times[name] / times['torch']:.2f}" for name in names]
        body.append([str(tuple(row["shape"])), row["pass"], f"{times['torch'] * 1e3:.2f}", *cells])
    return markdown(["(batch, N, width, heads)", "pass", "nn.TransformerEncoderLayer ms", *names], body)


def causal_speed(result: dict[str, Any]) -> str:
    names = ["intention", "sigma_intention", "intention, decay 0.99", "conjugate gradients"]
    body = []
    for row in result["lengths"]:
        for label in ("fwd", "fwd+bwd"):
            times = row[label]
            cells = [ratio(times, name) if name in times else "–" for name in names]
            body.append([f"{row['n']:,}", str(row["heads"]), label, f"{times['sdpa'] * 1e3:.1f}", *cells])
    head = ["N", "heads", "pass", "causal SDPA ms", "Intention", "σIntention", "Intention, decay .99", "30 steps of CG"]
    return markdown(head, body)


def causal_accuracy(result: dict[str, Any]) -> str:
    body = [
        [f"{row['alpha']:g}", f"{row['intention']:.0e}", f"{row['conjugate gradients']:.0e}"]
        for row in result["accuracy"]
    ]
    return markdown(["α", "Intention", "30 steps of conjugate gradients"], body)


def causal_memory(result: dict[str, Any]) -> str:
    body = [
        [
            f"{row['tokens']:,}",
            f"{row['state_bytes'] / 2**10:.0f} KiB",
            f"{row['peak_bytes'] / 2**20:.1f} MiB",
            f"{row['error']:.0e}",
        ]
        for row in result["memory"]
    ]
    return markdown(["tokens", "state of 8 heads", "peak of the process", "error of the last answer"], body)


def causal_forgetting(result: dict[str, Any]) -> str:
    """Ratios to causal SDPA for every decay; those of two threads and of pure torch at one of them."""
    decays, one = ["0.999", "0.99", "0.9", "0.05"], "0.99"
    found = {(tuple(r["shape"]), r["keys"], r["threads"], r["torch"]): r for r in result["forgetting"]}
    body = []
    for (shape, keys, threads, in_torch), row in found.items():
        if threads != 1 or in_torch:
            continue
        two, torch = found.get((shape, keys, 2, False)), found.get((shape, keys, 1, True))
        for label in ("fwd", "fwd+bwd"):
            cells = [ratio(row[label], decay) for decay in decays]
            cells += ["–" if other is None else ratio(other[label], one) for other in (two, torch)]
            about = [f"{shape[1]} × {shape[2]:,}", str(shape[3]), f"{keys}, {row['alpha']:g}", label]
            body.append([*about, f"{row[label]['sdpa'] * 1e3:.1f}", *cells])
    head = ["heads × N", "d", "keys, α", "pass", "causal SDPA ms", *(f"γ = {float(x):g}" for x in decays)]
    return markdown([*head, f"two threads, {one}", f"pure torch, {one}"], body)


def causal_layers(result: dict[str, Any]) -> str:
    body = []
    for row in result["layers"]:
        times, about = row["step"], f"{row['batch']} × {row['n']:,}"
        ms = f"{times['attention'] * 1e3:.1f}"
        body.append([about, f"{row['width']}, {row['heads']}", ms, f"{times['intention'] / times['attention']:.2f}"])
    return markdown(["batch × N", "width, heads", 'mixer="attention" ms', 'mixer="intention", times that'], body)


def native_rows(result: dict[str, Any], part: str) -> dict[tuple[Any, ...], dict[int, dict[str, Any]]]:
    """(shape, pass) -> threads -> row"""
    found: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    for row in result[part]:
        found.setdefault((tuple(row["shape"]), row["pass"]), {})[row["threads"]] = row
    return found


def share(result: dict[str, Any], row: dict[str, Any]) -> str:
    """Of the peak, in the forward; how much a backward computes depends on what is asked for."""
    if row["pass"] != "fwd":
        return ""
    peak = row["peak"] if "peak" in row else result["peak"][str(row["threads"])]  # of the machine of an earlier row
    return f"{row['flop']['intention'] / row['seconds']['native'] / peak:.0%}"


def native_part(result: dict[str, Any], part: str) -> str:
    goals = {tuple(row["shape"]): (row["prototype"], row["aim"]) for row in result["goals"] if part == "shapes"}
    head = ["(batch·heads, N, M, d, k)", "pass", "SDPA ms", "kernels", "in torch", "kernels, 2 threads"]
    counted = part != "causal"
    head += ["share of peak", "FLOP / SDPA's"] if counted else []
    head += ["prototype", "aim"] if goals else []
    body = []
    for (shape, label), by_threads in native_rows(result, part).items():
        row, two = by_threads[1], by_threads[2]
        times = row["seconds"]
        cells = [str(shape), label, f"{times['sdpa'] * 1e3:.2f}", ratio(times, "native"), ratio(times, "torch")]
        cells.append(ratio(two["seconds"], "native"))
        if counted:
            flop = row["flop"]
            cells += [share(result, row), f"{flop['intention'] / flop['sdpa']:.2g}" if label == "fwd" else ""]
        if goals:
            cells += [f"{of[label != 'fwd']:g}" for of in goals[shape]]
        body.append(cells)
    return markdown(head, body)


def ladder(result: dict[str, Any]) -> str:
    """Time at each alpha over that at alpha = 10, and how many of the elements were in float64."""
    alphas = ["0.0001", "0.01", "0.1", "1"]
    body = []
    for row in result["alphas"]:
        times = row["seconds"]
        cells = []
        for alpha in alphas:
            routes = row["routes"][alpha]
            wide = routes.get("float64", 0) / sum(routes.values())
            cells.append(f"{times[alpha] / times['10']:.2f}" + (f" ({wide:.0%})" if wide else ""))
        body.append([str(row["points"]), row["pass"], ratio(times, "10"), *cells])
    return markdown(["N", "pass", "α = 10, over SDPA", *(f"α = {float(alpha):g}" for alpha in alphas)], body)


def compiled(result: dict[str, Any]) -> str:
    body = []
    for row in result["rows"]:
        times = row["seconds"]
        cells = [f"{times['eager'] * 1e3:.2f}", f"{times['compiled'] / times['eager']:.2f}"]
        body.append([f"{row['call']} {tuple(row['shape'])}", row["pass"], *cells, f"{times['nothing'] * 1e3:.2f}"])
    return markdown(["call", "pass", "eager ms", "compiled / eager", "operator that does nothing, compiled, ms"], body)


OWN_TIME = "one thread, whose own time counts"


def machine(result: dict[str, Any]) -> str:
    kernels = f", kernels of {result['arch']}" if "arch" in result else ""
    return f"{result['machine']}{kernels}, torch {result['torch']}"


def native_about(result: dict[str, Any]) -> str:
    speeds = {threads: f"{speed / 1e9:.0f} GFLOP/s" for threads, speed in result["peak"].items()}
    return (
        f"{machine(result)}, float32, alpha = 1, one thread if a column does not say two. Peak is a product of two "
        f"1024 x 1024 matrices: {speeds['1']} with one thread."
    )


def fill(path: Path, name: str, text: str) -> None:
    """Replace what stands between the markers `name`."""
    old = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not pattern.search(old):
        raise SystemExit(f"{path} has no marker <!-- {name} -->")
    path.write_text(pattern.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", old), encoding="utf-8")


def main() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "ops.json").read_text())
    page = ROOT / "docs" / "speed.md"
    about = f"{machine(result)}, {result['dtype']}, alpha = {result['alpha']:g}."
    for name, text in {
        "about": about,
        "one thread": full(result, 1),
        "two threads": full(result, 2),
        "growth": growth(result),
        "memory": memory(result),
        "profile": profile(result),
    }.items():
        fill(page, name, text)
    result = json.loads((ROOT / "benchmarks" / "results" / "context.json").read_text())
    fill(ROOT / "docs" / "context.md", "updates", updates(result))
    fill(ROOT / "docs" / "context.md", "leave one out", leave_one_out(result))
    lines = (ROOT / "benchmarks" / "results" / "depth.jsonl").read_text().splitlines()
    depth = [json.loads(line) for line in lines]
    fill(ROOT / "docs" / "nn.md", "activations", activations(depth))
    fill(ROOT / "docs" / "nn.md", "training", training(depth))
    result = json.loads((ROOT / "benchmarks" / "results" / "modules.json").read_text())
    fill(ROOT / "docs" / "nn.md", "layers", modules(result))
    fill(ROOT / "docs" / "nn.md", "about layers", f"{machine(result)}, {OWN_TIME}.")
    result = json.loads((ROOT / "benchmarks" / "results" / "causal.json").read_text())
    page = ROOT / "docs" / "sequences.md"
    fill(page, "speed", causal_speed(result))
    fill(page, "accuracy", causal_accuracy(result))
    fill(page, "memory", causal_memory(result))
    fill(page, "forgetting", causal_forgetting(result))
    fill(page, "layers", causal_layers(result))
    for name, part in (("about forgetting", "forgetting"), ("about layers", "layers"), ("about speed", "lengths")):
        fill(page, name, f"{machine(result['machines'][part])}, {OWN_TIME}.")
    result = json.loads((ROOT / "benchmarks" / "results" / "native.json").read_text())
    fill(ROOT / "docs" / "speed.md", "in short", short(result))
    page = ROOT / "docs" / "native.md"
    fill(page, "about", native_about(result))
    for part in ("shapes", "sigma", "heads", "causal"):
        fill(page, part, native_part(result, part))
    fill(page, "ladder", ladder(json.loads((ROOT / "benchmarks" / "results" / "ladder.json").read_text())))
    fill(page, "compiled", compiled(json.loads((ROOT / "benchmarks" / "results" / "compiled.json").read_text())))


if __name__ == "__main__":
    main()
