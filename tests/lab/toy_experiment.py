"""For tests of the runner: it trains a line for some steps, and fails, dies or waits where it is told to."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from intention.lab.core.train import Plan, train
from intention.lab.experiments.base import Claim, Job, Measure, chooses, require
from intention.lab.tasks import Episode

TITLE = "A toy"
PLACE = "nowhere"
READING = "As it is."
EXCLUSIVE = False
MODELS = ("line", "plane")
SECONDS = {"quick": 30}


@dataclass(frozen=True)
class Net:
    width: int = 3
    learning_rate: float = 0.01


@dataclass(frozen=True)
class Config:
    """What the toy does."""

    models: tuple[str, ...] = chooses(("line",))
    seeds: int = chooses(3)
    steps: int = 5  # of training
    numbers: int = 2  # in the data of its row
    log: str = chooses("")  # a folder in which each run notes that it began and ended
    wait: float = chooses(0.0)  # seconds per step
    fails: tuple[int, ...] = chooses(())  # seeds that raise an error
    dies: tuple[int, ...] = chooses(())  # seeds whose process is killed, once
    always: bool = chooses(False)  # not once, but again and again
    line: Net = Net()
    plane: Net = Net(7)

    def __post_init__(self):
        require(self.steps >= 1, f"steps must be at least 1, got {self.steps}")
        require(set(self.models) <= set(MODELS), f"models are {MODELS}, got {self.models}")


PRESETS = {"quick": Config(), "standard": replace(Config(), steps=11), "paper": replace(Config(), steps=101)}


def jobs(config):
    return [Job("toy", config, model, seed) for seed in range(config.seeds) for model in config.models]


def note(job, word):
    if job.config.log:
        with (Path(job.config.log) / word).open("a") as file:
            file.write(f"{job.model}{job.seed}\n")


def run(job, place):
    config = job.config
    note(job, "began")
    if job.seed in config.fails:
        raise ZeroDivisionError("a bug")
    if job.seed in config.dies:
        once = Path(config.log) / f"died{job.seed}"
        if config.always or not once.exists():
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def sample(batch, generator):
        note(job, "stepped")
        time.sleep(config.wait)
        x = torch.randn(batch, 2, 1, generator=generator)
        return Episode(x, x, x, 2 * x)

    torch.manual_seed(job.seed)
    model = torch.nn.Linear(1, 1)
    plan = Plan(config.steps, 2, getattr(config, job.model).learning_rate)
    train(model, sample, lambda model, e: (model(e.query) - e.target).square().mean(), plan, seed=job.seed, place=place)
    note(job, "ended")
    yield Measure("weight", float(model.weight.detach()))
    yield Measure("threads", torch.get_num_threads(), data={"numbers": list(range(config.numbers))})


def claims(rows):
    return [Claim("A line is learned.", "nowhere", f"{len(rows)} rows", "holds")]


def finding(rows):
    return ""


def plot(rows):
    return []
