"""Many runs: over the processes of this machine, or on a cluster. A failure costs one run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.run import cluster as remote
from intention.lab.run.notes import Notes
from intention.lab.run.progress import Display, Tally
from intention.lab.run.runner import Task, perform

__all__ = ["Failure", "Outcome", "sweep"]

STRIKES = 3  # a run whose worker dies more often than this has failed
_ONE_AT_A_TIME = threading.Lock()  # runs use torch's global random numbers


@dataclass(frozen=True)
class Outcome:
    """What became of a run: rows, or an error, or it was stopped and can be resumed."""

    index: int
    rows: list[Row] | None = None
    error: str = ""
    trace: str = ""


@dataclass(frozen=True)
class Failure:
    task: Task
    error: str


def work(index: int, task: Task, notes: Notes | None) -> Outcome:
    """Run a task in a worker process. Never raises: an error is an outcome."""
    parent = os.getppid()
    if notes is not None:
        _leave_the_terminal()
        notes.start(index)
    tell = None if notes is None else notes.teller(index)
    try:
        place = Place(task.folder, tell, task.tensorboard, device=find_device(task.device))
        with _ONE_AT_A_TIME:
            torch.set_num_threads(1)
            outcome = Outcome(index, perform(task, place))
    except KeyboardInterrupt:
        outcome = Outcome(index)
    except LabError as error:
        outcome = Outcome(index, error=str(error))
    except Exception as error:
        outcome = Outcome(index, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    if notes is not None:
        if os.getppid() != parent:
            os._exit(1)  # nobody waits for it; a training run has saved its checkpoint
        notes.keep(index, outcome)
    return outcome


def _leave_the_terminal() -> None:
    """Ctrl-C reaches the parent alone, which then asks its workers to stop."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if hasattr(os, "setpgrp"):
            os.setpgrp()


def sweep(
    tasks: Sequence[Task], store: Callable[[Task, list[Row]], None], *, jobs: int, cluster: str | None = None
) -> list[Failure]:
    """Run all tasks; `store` is called in this process, for each as it ends. What failed is returned.

    Experiments that time things go first, one run after the other, on this machine. KeyboardInterrupt is raised after
    the runs at work on this machine have saved a checkpoint; those of a cluster are cancelled.
    """
    alone = [task for task in tasks if task.experiment.EXCLUSIVE]
    others = [task for task in tasks if not task.experiment.EXCLUSIVE]
    failures: list[Failure] = []
    with Display(Tally({task.id: task.weight for task in tasks})) as display:
        collect = _Collector(store, display, failures)
        if alone:
            _local(alone, 1, collect)
        if others and cluster is not None:
            remote.run(others, cluster, work, collect.cluster(others))
        elif others:
            _local(others, jobs, collect)
    return failures


@dataclass
class _Collector:
    """Takes outcomes: rows are stored, errors listed, the display told."""

    store: Callable[[Task, list[Row]], None]
    display: Display
    failures: list[Failure]

    def take(self, task: Task, outcome: Outcome) -> None:
        if outcome.rows is not None:
            self.store(task, outcome.rows)
        elif outcome.error:
            error = outcome.error
            if outcome.trace:
                error += f" (the traceback is in {_keep_trace(task, outcome.trace)})"
            self.failures.append(Failure(task, error))
            self.display.say(f"failed: {task.id}")
        self.display.tally.end(task.id)

    def cluster(self, tasks: Sequence[Task]) -> Callable[[int, Outcome | str], None]:
        def take(index: int, outcome: Outcome | str) -> None:
            self.take(tasks[index], Outcome(index, error=outcome) if isinstance(outcome, str) else outcome)

        return take


def _keep_trace(task: Task, trace: str) -> Path:
    path = task.folder / "error.txt"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace, encoding="utf-8")
    return path


def _local(tasks: Sequence[Task], jobs: int, collect: _Collector) -> None:
    """Over processes of this machine. When a worker is killed, the pool is lost with all that is at work in it: it is
    started anew, the suspects last, and those that were at work in two lost pools one at a time.
    """
    from joblib.externals.loky.process_executor import BrokenProcessPool

    waiting = dict(enumerate(tasks))
    strikes: Counter[int] = Counter()
    problem: LabError | None = None
    with tempfile.TemporaryDirectory(prefix="intention-") as folder:
        notes = Notes(Path(folder))
        collect.display.poll = lambda: _look(notes, waiting, collect.display.tally)
        with _interrupts(notes):
            while waiting and not notes.stopping:
                order = sorted(waiting, key=lambda index: strikes[index])
                first = [index for index in order if strikes[index] < 2]
                try:
                    for outcome in _pool(first or order, tasks, notes, jobs if first else 1):
                        try:
                            collect.take(waiting.pop(outcome.index), outcome)
                        except LabError as error:  # rows cannot be written; runs at work save their checkpoints first
                            problem = problem or error
                            notes.stop()
                except BrokenProcessPool:
                    _judge(waiting, strikes, notes, collect)
            if problem is not None:
                raise problem
            if notes.stopping:
                raise KeyboardInterrupt


def _pool(indices: Sequence[int], tasks: Sequence[Task], notes: Notes, jobs: int) -> Iterator[Outcome]:
    from joblib import Parallel, delayed, parallel_config

    for index in indices:
        notes.clear(index)
    # at least two workers, because with one joblib works in this process; pre_dispatch is how many runs are out
    with parallel_config("loky", inner_max_num_threads=1), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")  # it is replaced
        options: dict[str, Any] = {"n_jobs": max(2, jobs), "pre_dispatch": jobs, "batch_size": 1, "max_nbytes": None}
        parallel: Any = Parallel(return_as="generator_unordered", **options)
        yield from parallel(delayed(work)(index, tasks[index], notes) for index in _until_stopped(indices, notes))


def _until_stopped(indices: Sequence[int], notes: Notes) -> Iterator[int]:
    for index in indices:
        if notes.stopping:
            return
        yield index


def _judge(waiting: dict[int, Task], strikes: Counter[int], notes: Notes, collect: _Collector) -> None:
    """A pool was lost: which of the runs at work had ended, which begin again, which have failed."""
    suspects = [index for index in waiting if notes.started(index)]
    if not suspects and strikes[-1] >= STRIKES:
        raise LabError("worker processes end before they start to work; is there enough memory for them?")
    strikes[-1] += not suspects
    for index in suspects:
        outcome = notes.kept(index)
        strikes[index] += 1
        if outcome is None and strikes[index] > STRIKES:
            outcome = Outcome(index, error="its worker process was killed again and again; is there enough memory?")
        if outcome is not None:
            collect.take(waiting.pop(index), outcome)


def _look(notes: Notes, waiting: dict[int, Task], tally: Tally) -> None:
    for index, task in list(waiting.items()):
        found = notes.step(index)
        if found is not None:
            tally.note(task.id, *found)


@contextlib.contextmanager
def _interrupts(notes: Notes) -> Iterator[None]:
    """Ctrl-C: the runs at work save a checkpoint and stop; a second one stops at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if notes.stopping:
            raise KeyboardInterrupt
        notes.stop()
        os.write(sys.stderr.fileno(), b"stopping: runs at work save a checkpoint first; Ctrl-C again stops at once\n")

    before = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
