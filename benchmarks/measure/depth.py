"""Depth: activations at initialisation, and what 200 steps of training reach, for scaled and unscaled stacks.

    python benchmarks/measure/depth.py

The task: the points of a set are a hidden vector plus noise of the same size, and each point is to tell the hidden
vector. A model that mixes nothing cannot get below a mean squared error of 0.5; the best of N points is 1 / (N + 1).
Each row goes to benchmarks/results/depth.jsonl when it is done, so a run that was stopped goes on where it was;
`python benchmarks/pages/depth_figure.py` draws docs/depth.svg and the tables of docs/nn.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import intention
from intention.nn import Informer, LinTransformer, NPFormer, SigmaInformer, Transformer

RESULTS = Path(__file__).parents[1] / "results" / "depth.jsonl"
MODELS = {m.__name__: m for m in (Transformer, SigmaInformer, Informer, LinTransformer, NPFormer)}
CONFIG: dict[str, Any] = {
    "width": 256,
    "heads": 8,
    "feedforward": 512,
    "dropout": 0.1,
    "features": 8,
    "tokens": 256,  # of a batch
    "rate": 3e-4,
    "warmup": 20,
    "clip": 1.0,
    "steps": 200,
}


def build(model: str, scale: str, layers: int, norm_first: bool) -> nn.Module:
    options: dict[str, Any] = {} if scale == "default" else {"scale": None if scale == "none" else scale}
    return MODELS[model](
        CONFIG["width"],
        CONFIG["heads"],
        layers,
        CONFIG["feedforward"],
        CONFIG["dropout"],
        batch_first=True,
        norm_first=norm_first,
        **options,
    )


def activations(model: str, scale: str, layers: int, n: int, norm_first: bool, seed: int) -> dict[str, Any]:
    """The variance of what each layer and each mixer gives, for standard normal inputs."""
    torch.manual_seed(seed)
    stack = build(model, scale, layers, norm_first).eval()
    layer_variance: list[float] = []
    mixer_variance: list[float] = []
    for layer in stack.layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda _m, _i, out: layer_variance.append(out.var().item()))
        layer.self_attn.register_forward_hook(lambda _m, _i, out: mixer_variance.append(out[0].var().item()))
    with torch.no_grad():
        stack(torch.randn(8, n, CONFIG["width"]))
    return {"layer_variance": layer_variance, "mixer_variance": mixer_variance}


class Net(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.read = nn.Linear(CONFIG["features"], CONFIG["width"])
        self.stack = stack
        self.answer = nn.Linear(CONFIG["width"], CONFIG["features"])

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.stack(self.read(x)))


def training(model: str, scale: str, layers: int, n: int, norm_first: bool, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = Net(build(model, scale, layers, norm_first))
    optimiser = torch.optim.AdamW(net.parameters(), CONFIG["rate"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / CONFIG["warmup"]))
    losses, gradients, start = [], [], time.perf_counter()
    for _ in range(CONFIG["steps"]):
        hidden = torch.randn(CONFIG["tokens"] // n, 1, CONFIG["features"])
        points = hidden + torch.randn(len(hidden), n, CONFIG["features"])
        loss = (net(points) - hidden).square().mean()
        optimiser.zero_grad()
        loss.backward()
        gradients.append(nn.utils.clip_grad_norm_(net.parameters(), CONFIG["clip"]).item())
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return {
        "loss": [statistics.fmean(losses[i : i + 10]) for i in range(0, len(losses), 10)],
        "gradient": [statistics.median(gradients[:20]), statistics.median(gradients[-20:])],
        "finite": bool(torch.isfinite(torch.tensor(losses + gradients)).all()),
        "seconds": time.perf_counter() - start,
    }


def plan() -> list[dict[str, Any]]:
    """Every run; what one seed tells first."""
    runs = []
    both = [("Informer", "default"), ("SigmaInformer", "default"), ("Transformer", "default")]
    scales = [("Informer", "variance"), ("Informer", "none"), ("SigmaInformer", "none")]
    others = [("LinTransformer", "default"), ("NPFormer", "default")]
    for norm_first in (False, True):
        for n in (8, 32, 128, 512):
            for model, scale in both + scales + others:
                runs.append(("activations", model, scale, 12, n, norm_first, 0))
    unscaled = [("Informer", "none"), ("SigmaInformer", "none")]
    for layers in (1, 4, 6, 24, 18, 9):
        deep = [("Informer", "default"), ("Transformer", "default")] if layers == 24 else []
        runs += [("training", model, scale, layers, 32, False, 0) for model, scale in unscaled + deep]
    runs += [("training", model, scale, 12, 32, False, 0) for model, scale in both + scales + others]
    runs += [("training", model, scale, 12, 128, False, 0) for model, scale in both + scales[:2]]
    for seed in (1, 2):
        runs += [("training", model, scale, 12, 32, False, seed) for model, scale in both + scales]
        runs += [
            ("training", model, scale, layers, 32, False, seed) for layers in (1, 4, 6) for model, scale in unscaled
        ]
    names = ("kind", "model", "scale", "layers", "n", "norm_first", "seed")
    return [dict(zip(names, run, strict=True)) for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=int, default=0, help="which part of the runs this process does")
    parser.add_argument("--shares", type=int, default=1, help="of how many parts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    done = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    keys = [{k: row[k] for k in ("kind", "model", "scale", "layers", "n", "norm_first", "seed")} for row in done]
    for run in plan()[args.share :: args.shares]:
        if run in keys:
            continue
        arguments = {k: v for k, v in run.items() if k != "kind"}
        row = run | (activations if run["kind"] == "activations" else training)(**arguments)
        row |= {"config": CONFIG, "version": intention.__version__, "torch": torch.__version__}
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = row["loss"] if "loss" in row else row["layer_variance"]
        print(*run.values(), " ".join(f"{x:.3g}" for x in shown[:: max(1, len(shown) // 5)]), flush=True)


if __name__ == "__main__":
    main()
