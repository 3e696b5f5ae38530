"""Like the toy, but it times things: nothing else may run meanwhile."""

import time
from dataclasses import dataclass
from pathlib import Path

from intention.lab.experiments.base import Job, Measure, chooses

TITLE, PLACE, READING, EXCLUSIVE, SECONDS = "A clock", "nowhere", "As it is.", True, {}


@dataclass(frozen=True)
class Config:
    seeds: int = chooses(5)
    log: str = chooses("")


PRESETS = {name: Config() for name in ("quick", "standard", "paper")}


def jobs(config):
    return [Job("timing", config, "clock", seed) for seed in range(config.seeds)]


def run(job, place):
    start = time.time()
    time.sleep(0.3)
    if job.config.log:
        with (Path(job.config.log) / "times").open("a") as file:
            file.write(f"{start} {time.time()}\n")
    yield Measure("seconds", time.time() - start)


def claims(rows):
    return []


def finding(rows):
    return ""


def plot(rows):
    return []
