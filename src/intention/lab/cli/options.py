"""The flags of the commands: dataclasses that tyro reads. Every field of an experiment's Config is a flag, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from intention.lab.core import ranks
from intention.lab.experiments.base import PRESETS, Experiment

__all__ = ["Device", "List", "Report", "Reproduce", "Run", "Sweep", "Switch", "Usage", "parse", "parse_with_config"]

T = TypeVar("T")
Preset = Literal["quick", "standard", "paper"]
Switch = tyro.conf.FlagCreatePairsOff[bool]
Device = Annotated[str, tyro.conf.arg(metavar="NAME")]
Text = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
Out = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="DIR",
        help_behavior_hint="(default: intention-results/PRESET; PRESET-DATA for own data, -changed for other sizes)",
    ),
]


class Usage(Exception):
    """A command that cannot be meant: told before any work, exit code 2."""


def cpus() -> int:
    import joblib

    return joblib.cpu_count()


def _at_least_one(jobs: int) -> None:
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")


@dataclass(frozen=True)
class Run:
    preset: Preset = "quick"
    """Sizes of the experiment; sets the defaults of the flags below."""
    out: Out = None
    """Folder of rows and checkpoints."""
    resume: Switch = False
    """Continue unfinished runs from their checkpoints."""
    fresh: Switch = False
    """Delete these runs, finished or not, and start them over."""
    tensorboard: bool = True
    """Write TensorBoard events beside the checkpoints."""
    device: Device = "cpu"
    """Where models are trained: auto (a GPU if there is one), cpu, cuda, cuda:N or mps. Seeds mean the same data."""
    threads: int = 1
    """Threads of torch; these models are small, and more of them are rarely faster."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, got {self.threads}")
        if self.resume and self.fresh:
            raise ValueError("--resume continues runs, --fresh deletes them: give one of the two")


@dataclass(frozen=True)
class Sweep:
    preset: Preset = "quick"
    """Sizes of the experiment; sets the defaults of the flags below."""
    out: Out = None
    """Folder of rows and checkpoints."""
    jobs: int = field(default_factory=cpus)
    """Runs at a time, each in a process with one thread."""
    cluster: Text = None
    """Address of a dask scheduler, tcp://...: the runs go there instead."""
    device: Device = "cpu"
    """Where models are trained: auto (a GPU if there is one), cpu, cuda, cuda:N or mps. Runs share it: see --jobs."""
    search: Switch = False
    """Try the grid of learning rates that all models share, with a seed of its own, and tell the best."""
    fresh: Switch = False
    """Delete these runs, finished or not, and start them over. Otherwise unfinished ones continue."""
    tensorboard: bool = False
    """Write TensorBoard events beside the checkpoints."""

    def __post_init__(self) -> None:
        _at_least_one(self.jobs)


@dataclass(frozen=True)
class Reproduce:
    preset: Preset = "quick"
    """Sizes of the experiments."""
    out: Annotated[
        Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: intention-results/PRESET)")
    ] = None
    """Folder of rows, checkpoints and the report."""
    only: Annotated[str | None, tyro.conf.arg(metavar="A,B", help_behavior_hint="(default: all)")] = None
    """Names of experiments, separated by commas."""
    jobs: int = field(default_factory=cpus)
    """Runs at a time, each in a process with one thread."""
    cluster: Text = None
    """Address of a dask scheduler, tcp://...: the runs go there instead."""
    device: Device = "cpu"
    """Where models are trained: auto (a GPU if there is one), cpu, cuda, cuda:N or mps. Runs share it: see --jobs."""
    fresh: Switch = False
    """Delete the runs, finished or not, and start them over. Otherwise finished ones are reused."""

    def __post_init__(self) -> None:
        _at_least_one(self.jobs)


@dataclass(frozen=True)
class Report:
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """Folder with rows (*.jsonl)."""


@dataclass(frozen=True)
class List:
    pass


def parse(kind: type[T], command: str, about: str, args: Sequence[str]) -> T:
    """The flags of a command; wrong ones end the process with code 2 and a message."""
    try:
        return tyro.cli(
            kind, prog=f"intention {command}", description=about, args=list(args), console_outputs=ranks.first()
        )
    except ValueError as error:  # an impossible value, of __post_init__
        raise Usage(str(error)) from error


def parse_with_config(kind: type[T], command: str, experiment: Experiment, args: Sequence[str]) -> tuple[T, Any]:
    """The flags of a command and those of an experiment's Config, whose defaults are the preset's."""
    config = experiment.PRESETS[_preset(args)]
    unnamed = tyro.conf.arg(name="")  # flags are --steps and --attention.heads, not --config.steps
    both = dataclasses.make_dataclass(
        "Flags",
        [
            ("options", Annotated[kind, unnamed], field(default_factory=kind)),
            ("config", Annotated[type(config), unnamed], field(default=config)),
        ],
    )
    about = f"{experiment.TITLE} ({experiment.PLACE})"
    parsed: Any = parse(both, command, about, args)
    return parsed.options, parsed.config


def _preset(args: Sequence[str]) -> str:
    """Which preset is asked for; nonsense is left to the parser to refuse."""
    found = PRESETS[0]
    for index, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name == "--preset":
            value = value if equals else "".join(args[index + 1 : index + 2])
            found = value if value in PRESETS else found
    return found
