"""One run: its rows, its folder, and whether it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

import intention
from intention.lab.core import checkpoint, results
from intention.lab.core.files import LabError, write_whole
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.core.train import Diverged
from intention.lab.experiments.base import Experiment, Job, Measure, relevant, score

__all__ = [
    "Task",
    "claimed",
    "drop_rows",
    "expected_seconds",
    "finished",
    "perform",
    "plan",
    "rows_file",
    "start_over",
    "store",
    "unfinished",
]


@dataclass(frozen=True)
class Task:
    """A job and all that another process needs to run it."""

    job: Job
    experiment: Experiment  # a module: pickled by its name
    preset: str
    out: Path
    tensorboard: bool = False
    weight: float = 1.0  # seconds that it is expected to take; a guess
    search: bool = False  # a training that diverges is an answer, too
    device: str = "cpu"  # found where the run works: a worker may have others
    measured: bool = False  # whether that guess comes from what its experiment says of the preset

    @property
    def id(self) -> str:
        return f"{self.job.experiment}/{self.job.id}"

    @property
    def folder(self) -> Path:
        """Where its checkpoint is. A value of the job may hold signs that a folder's name should not."""
        return self.out / "runs" / self.job.experiment / re.sub(r"[^\w.+=-]", "_", self.job.id)

    @property
    def begun(self) -> bool:
        """Whether there is a checkpoint; a run of several trainings has one for each, in folders of their own."""
        return any(self.folder.rglob(checkpoint.NAME))


def plan(
    experiment: Experiment,
    config: object,
    preset: str,
    out: Path,
    *,
    tensorboard: bool = False,
    searched: Iterable[Job] | None = None,
    device: str = "cpu",
) -> list[Task]:
    """The runs that a config asks for, or those of a search; each once."""
    jobs = list({job.id: job for job in (experiment.jobs(config) if searched is None else searched)}.values())
    if not jobs:
        raise ValueError("this config asks for no runs")
    known = _seconds_of_a_run(experiment, preset, config)
    # where nothing was measured: a second and 5 milliseconds a step
    weight = 1 + 0.005 * float(getattr(config, "steps", 0)) if known is None else known
    out = out.absolute()  # a worker may have another working folder
    rest = (weight, searched is not None, device, known is not None)
    return [Task(job, experiment, preset, out, tensorboard, *rest) for job in jobs]


def _seconds_of_a_run(experiment: Experiment, preset: str, config: Any) -> float | None:
    """The preset's time over the number of its runs, whatever part of them is asked for; steps count in proportion.

    The preset's runs are counted without data: which set there is changes how long they take, but not their number.
    """
    known, usual = expected_seconds(experiment, preset), experiment.PRESETS[preset]
    if known is None:
        return None
    if hasattr(usual, "data"):
        usual = dataclasses.replace(usual, data="built-in")
    steps, of = getattr(config, "steps", None), getattr(usual, "steps", None)
    share = steps / of if isinstance(steps, int) and isinstance(of, int) and of > 0 else 1.0
    return known / max(len(list(experiment.jobs(usual))), 1) * share


def expected_seconds(experiment: Experiment, preset: str) -> float | None:
    """What an experiment says its preset takes on one core, all runs together; None if it does not say."""
    return experiment.SECONDS.get(preset)


def perform(task: Task, place: Place) -> list[Row]:
    """Run a task and make its measures rows."""
    job, module = task.job, task.experiment
    start = time.perf_counter()
    try:
        measures = list(module.run(job, place))
    except Diverged:
        if not task.search:
            raise
        measures = [Measure(score(module), None)]
    seconds = time.perf_counter() - start
    if not measures:
        raise LabError(f"the run {job.id} of {job.experiment} measured nothing")
    return [
        Row(
            experiment=job.experiment,
            run=job.id,
            preset=preset_name(job, module, task.preset),
            config=dataclasses.asdict(job.config),
            model=job.model if measure.model is None else measure.model,
            seed=job.seed,
            metric=measure.metric,
            value=measure.value,
            x=measure.x,
            interval=measure.interval,
            data=measure.data,
            seconds=round(seconds, 3),
            intention=intention.__version__,
            torch=torch.__version__,
            rows=len(measures),
        )
        for measure in measures
    ]


def preset_name(job: Job, experiment: Experiment, preset: str) -> str:
    """The preset, and whether anything that this run depends on differs from it."""
    same = relevant(job.config, job.model) == relevant(experiment.PRESETS[preset], job.model)
    return preset if same else f"{preset}, changed"


def rows_file(out: Path, experiment: str) -> Path:
    return out / f"{experiment}.jsonl"


def finished(rows: Iterable[Row], jobs: Iterable[Job]) -> set[str]:
    """The ids of the jobs whose rows are all there."""
    count: Counter[str] = Counter()
    wanted: dict[str, int] = {}
    for row in rows:
        count[row.run] += 1
        wanted[row.run] = row.rows
    return {job.id for job in jobs if job.id in count and count[job.id] >= wanted[job.id]}


def unfinished(tasks: Sequence[Task]) -> list[Task]:
    """The tasks that are still to do. Reads the rows, so that a broken line is found before any work."""
    done: set[str] = set()
    for path, group in by_file(tasks).items():
        ended = finished(results.read(path), [task.job for task in group])
        done |= {task.id for task in group if task.job.id in ended}
    return [task for task in tasks if task.id not in done]


def by_file(tasks: Iterable[Task]) -> dict[Path, list[Task]]:
    groups: dict[Path, list[Task]] = {}
    for task in tasks:
        groups.setdefault(rows_file(task.out, task.job.experiment), []).append(task)
    return groups


def store(task: Task, rows: Sequence[Row]) -> None:
    """All rows of a run in one append: a run is there or it is not."""
    results.append(rows_file(task.out, task.job.experiment), rows)


def drop_rows(tasks: Iterable[Task]) -> None:
    """Take the rows of these runs out of their files; all other lines stay as they are."""
    for path, group in by_file(tasks).items():
        runs = {task.job.id for task in group}
        if not any(row.run in runs for row in results.read(path)):
            continue
        lines = path.read_text(encoding="utf-8").split("\n")
        kept = [line for line in lines if not line.strip() or json.loads(line)["run"] not in runs]
        write_whole(path, "\n".join(kept).encode())


def start_over(tasks: Iterable[Task]) -> None:
    """Forget these runs, and only these: their rows, then their folders."""
    tasks = list(tasks)
    drop_rows(tasks)
    for task in tasks:
        try:
            shutil.rmtree(task.folder)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise LabError(f"cannot delete {task.folder}: {error.strerror or error}") from error


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold an output folder: find out now whether it can be written, and keep others from working in it meanwhile."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe.{os.getpid()}"
        try:
            write_whole(probe, bytes(65536))
        finally:
            probe.unlink(missing_ok=True)
        lock = (out / ".lock").open("a")  # not "w", which would empty a file that it links to
    except OSError as error:
        raise LabError(f"cannot work in the folder {out}: {error.strerror or error}; choose one with --out") from error
    with lock:
        _lock(lock, out)
        yield


def _lock(file: IO[str], out: Path) -> None:
    """Released when the file is closed, also by kill -9. Where the system has no such locks there are none."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LabError(
            f"another `intention` works in {out}; wait for it, or choose another folder with --out"
        ) from None
    except OSError:
        return
