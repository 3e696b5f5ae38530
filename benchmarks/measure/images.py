"""Few-shot episodes of images: where a training step spends its time, and the share that loading takes.

    python benchmarks/measure/images.py

One thread, as runs of the lab have it: 2 episodes (200 images of 28x28x3) through Conv4-64, forwards and backwards. The
forms are timed in turn within one run.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from context import medians
from intention.fewshot import encoders
from intention.lab.experiments.fewshot import PRESETS
from intention.lab.experiments.fewshot import model as fewshot
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot.task import Pool

EPISODES = {"way": 5, "shot": 5, "queries": 15}
GROUPS = {
    "convolution": ("conv",),
    "batch norm": ("batch_norm",),
    "pooling": ("max_pool",),
    "ReLU": ("relu", "threshold", "clamp"),
    "solve": ("Ridge", "bmm", "cholesky", "linalg", "triangular"),
}


def pool() -> Pool:
    """Noise, as large as a tenth of miniImageNet."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (4800, 28, 28, 3), generator=generator, dtype=torch.uint8)
    return Pool(x, torch.arange(4800) % 80)


class Rows(nn.Module):
    """Conv4 as it is mostly written: channels first, ReLU before the pooling."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside in (3, 64, 64, 64):
            layers += [nn.Conv2d(inside, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)]
        self.net = nn.Sequential(*layers, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.contiguous())


def forms(seconds: float) -> dict[str, Any]:
    """Forwards and backwards of the encoder alone."""
    x = encoders.normalise(pool().sample(2, torch.Generator().manual_seed(1), **EPISODES).x.flatten(0, 1))
    nets = {
        "channels first": Rows(),
        "channels last": encoders.Conv4(28, 3),
        "channels last, bfloat16": encoders.Conv4(28, 3, precision="bfloat16"),
    }

    def step(net: nn.Module) -> None:
        net(x).square().mean().backward()

    return medians({name: partial(step, net) for name, net in nets.items()}, seconds)


def loading(model: str, seconds: float) -> dict[str, Any]:
    """A whole step, and the drawing of its episodes alone (which a thread does meanwhile)."""
    data, generator = pool(), torch.Generator().manual_seed(1)
    net = fewshot_runs.build(PRESETS["standard"], model, data)
    optimiser = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        optimiser.zero_grad()
        net(data.sample(2, generator, **EPISODES)).backward()
        optimiser.step()

    return medians({"step": step, "episodes": lambda: data.sample(2, generator, **EPISODES)}, seconds)


def shares(steps: int) -> dict[str, float]:
    """Where the time of a step of Intention goes, by torch's profiler."""
    data, generator = pool(), torch.Generator().manual_seed(1)
    net = fewshot_runs.build(PRESETS["standard"], "intention", data)
    assert isinstance(net, fewshot.FewShot)
    net(data.sample(2, generator, **EPISODES)).backward()
    with torch.profiler.profile() as profile:
        for _ in range(steps):
            net(data.sample(2, generator, **EPISODES)).backward()
    spent: Counter[str] = Counter()
    for event in profile.key_averages():
        group = next((name for name, words in GROUPS.items() if any(word in event.key for word in words)), "other")
        spent[group] += event.self_cpu_time_total
    return {name: time / spent.total() for name, time in spent.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each group of timings")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = forms(args.seconds)
    for name, time in found.items():
        print(f"Conv4, {name}: {time / found['channels first']:.2f} of channels first")
    episodes = {}
    for model in ("intention", "attention", "neural_process", "protonet", "maml_first", "maml"):
        times = loading(model, args.seconds)
        episodes[model] = {"step": times["step"], "share": times["episodes"] / times["step"]}
        print(f"{model}: episodes are {episodes[model]['share']:.2%} of a step of {times['step']:.3f} s")
    where = shares(10)
    print(", ".join(f"{name} {share:.0%}" for name, share in where.items()))
    result = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "encoder_seconds": found,
        "loading": episodes,
        "where": where,
    }
    (Path(__file__).parents[1] / "results" / "images.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
