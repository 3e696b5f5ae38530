"""Trains the small models that `intention play` ships: `make play-models`, about 20 minutes of one core.

The lab's models and tasks, narrower, and with another number of observations in each step, so that a model knows few
and many of them. Nothing but sine curves and the built-in glyphs is seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch
from torch import nn

from intention.lab.core.files import write_whole
from intention.lab.core.place import Place
from intention.lab.core.train import train
from intention.lab.experiments import pixels, sine
from intention.lab.experiments.episodes import loss
from intention.lab.experiments.pixels import task as pixel_task
from intention.lab.experiments.sine import task as sine_task
from intention.lab.tasks import Episode
from intention.play import models

SEED = 0
POINTS = {"sine": (2, 20), "pixels": (20, 400)}  # observations of a step
JUDGED = {"sine": (2, 5, 10, 20), "pixels": (20, 100, 300)}


def how_many(task: str, generator: torch.Generator) -> int:
    low, high = POINTS[task]
    return int(torch.randint(low, high + 1, (), generator=generator))


class Task:
    """Episodes to train with, and held-out ones."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.config = models.SINE if name == "sine" else models.PIXELS
        if name == "pixels":
            self.seen, self.unseen = pixels.images("built-in")

    def sample(self, batch: int, generator: torch.Generator) -> Episode:
        points = how_many(self.name, generator)
        if self.name == "sine":
            return sine_task.sample(batch, generator, points=points, queries=100)
        return pixel_task.sample(self.seen, batch, generator, points=points, queries=self.config.queries)

    def held_out(self) -> dict[int, Episode]:
        generator = torch.Generator().manual_seed(1_000_000)
        if self.name == "sine":
            return {n: sine_task.sample(200, generator, points=n, queries=sine.GRID) for n in JUDGED["sine"]}
        return pixel_task.held_out(self.unseen, 50, generator, points=JUDGED["pixels"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="TASK-MODEL, for instance sine-maml")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    for name, every in models.NAMES.items():
        wanted = [model for model in every if flags.only in ("", f"{name}-{model}")]
        task = Task(name) if wanted else None
        for model in wanted:
            assert task is not None
            make(task, model)


def make(task: Task, name: str) -> None:
    torch.manual_seed(SEED)  # as models.untrained
    model, plan, start = models.build(task.name, name), task.config.plan(name), time.monotonic()
    train(model, task.sample, loss, plan, seed=SEED, place=Place())
    low, high = POINTS[task.name]
    about = {
        "model": name,
        "sizes": dataclasses.asdict(getattr(task.config, name)),
        "data": "y = a sin(x - b), as in the experiment `sine`" if task.name == "sine" else "built-in glyphs, 28 x 28",
        "recipe": f"mean squared error, {plan.steps} steps of {plan.batch} tasks with {low} to {high} observations "
        f"(drawn for each step), Adam, rate {plan.learning_rate} to 0 by cosine, clipped at {plan.clip}, seed {SEED}",
        "error by observations": errors(model, task),
        "seconds": round(time.monotonic() - start),
        "by": "tools/play_models.py",
    }
    save(task.name, name, model, about)
    print(json.dumps(about | {"bytes": models.file(task.name, name).stat().st_size}), flush=True)


@torch.no_grad()
def errors(model: nn.Module, task: Task) -> dict[int, float]:
    """Mean squared error on held-out tasks."""
    found = {}
    for n, (query, key, value, target) in task.held_out().items():
        answers = [model(query, *part) for part in zip(key.split(25), value.split(25), strict=True)]
        found[n] = round(float((torch.cat(answers) - target).square().mean()), 5)
    return found


def save(task: str, name: str, model: nn.Module, about: dict[str, object]) -> None:
    from safetensors.torch import save as to_bytes

    # parameters, not the state_dict: an embedding that keys and queries share is written once
    tensors = {key: value.detach().clone().contiguous() for key, value in model.named_parameters()}
    write_whole(models.file(task, name), to_bytes(tensors, {"about": json.dumps(about)}))


if __name__ == "__main__":
    main()
