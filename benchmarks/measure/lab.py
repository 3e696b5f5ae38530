"""The lab: MAML vectorised over tasks against a Python loop, and the share of a training step that the sampler takes.

    python benchmarks/measure/lab.py

The forms of MAML are timed in turn within one run, with all threads and with one; they give the same numbers. Samplers
are timed with one thread, as runs of the lab have it.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from context import medians
from intention.lab.core import train as loop
from intention.lab.core.place import Place
from intention.lab.experiments import find
from intention.lab.experiments.base import Job
from intention.lab.experiments.sine import task as sine
from intention.lab.models.maml import Maml


class OneByOne(nn.Module):
    """MAML as it is mostly written: tasks in a loop, `autograd.grad` with create_graph."""

    def __init__(self, model: Maml) -> None:
        super().__init__()
        self.model = model

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.stack([self.answer(query[0], k, v) for k, v in zip(key, value, strict=True)])

    def answer(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.model.net.named_parameters())
        for _ in range(self.model.steps):
            error = (functional_call(self.model.net, weights, (key,)) - value).square().mean()
            slopes = torch.autograd.grad(error, list(weights.values()), create_graph=True)
            pairs = zip(weights.items(), slopes, strict=True)
            weights = {name: weight - self.model.rate * slope for (name, weight), slope in pairs}
        return functional_call(self.model.net, weights, (query,))


class ByFunc(nn.Module):
    """The same by torch.func: `grad` inside, `vmap` over the tasks."""

    def __init__(self, model: Maml) -> None:
        super().__init__()
        self.model = model

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights: dict[str, Tensor] = dict(self.model.net.named_parameters())
        return vmap(self.answer, in_dims=(None, None, 0, 0))(weights, query[0], key, value)

    def answer(self, weights: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def error(weights: dict[str, Tensor]) -> Tensor:
            return (functional_call(self.model.net, weights, (key,)) - value).square().mean()

        for _ in range(self.model.steps):
            slopes = grad(error)(weights)
            weights = {name: weight - self.model.rate * slopes[name] for name, weight in weights.items()}
        return functional_call(self.model.net, weights, (query,))


def maml(seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Maml(1, (128, 128, 128, 128, 1), steps=3, rate=0.01)
    episode = sine.sample(8, torch.Generator().manual_seed(0))
    forms = {"vectorised": model, "torch.func": ByFunc(model), "loop": OneByOne(model)}

    def step(form: nn.Module) -> None:
        (form(*episode[:3]) - episode.target).square().mean().backward()

    return medians({name: lambda form=form: step(form) for name, form in forms.items()}, seconds)


def sampler(name: str, steps: int) -> list[dict[str, Any]]:
    """The training steps of one run of each model, at the quick preset's sizes."""
    experiment, rows = find(name), []
    config = experiment.PRESETS["quick"]
    plain = loop._step
    for model in config.models:
        spent = {"sampler": 0.0, "step": 0.0}

        def timed(wrapped: Any, state: Any, sample: Any, *rest: Any, spent: Any = spent) -> float:
            def clocked(batch: int, generator: torch.Generator) -> Any:
                start = time.perf_counter()
                episode = sample(batch, generator)
                spent["sampler"] += time.perf_counter() - start
                return episode

            if state.step == 10:  # the first steps warm up
                spent.update(sampler=0.0, step=0.0)
            start = time.perf_counter()
            value = plain(wrapped, state, clocked, *rest)
            spent["step"] += time.perf_counter() - start
            return value

        loop._step = timed
        try:
            job = next(job for job in experiment.jobs(replace(config, steps=steps, models=(model,), seeds=1)))
            for _ in experiment.run(Job(name, job.config, model, 0, job.at), Place()):
                pass
        finally:
            loop._step = plain
        rows.append({"experiment": name, "model": model, "share": spent["sampler"] / spent["step"]})
        print(f"{name:8s} {model:18s} sampler {rows[-1]['share']:.1%} of a step")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the two forms of MAML")
    parser.add_argument("--steps", type=int, default=200, help="of each model, for the samplers")
    args = parser.parse_args()
    times = {}
    for threads in sorted({torch.get_num_threads(), 1}, reverse=True):
        torch.set_num_threads(threads)
        found = times[threads] = maml(args.seconds)
        ratios = {name: f"{found[name] / found['vectorised']:.2f}" for name in ("loop", "torch.func")}
        print(f"MAML, 8 tasks, {threads} thread(s): {ratios} times the time of the vectorised form")
    shares = [row for name in ("sine", "policy", "kabsch", "scaling") for row in sampler(name, args.steps)]
    result = {
        "torch": torch.__version__,
        "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "maml_seconds": times,
        "sampler": shares,
    }
    path = Path(__file__).parents[1] / "results" / "lab.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
