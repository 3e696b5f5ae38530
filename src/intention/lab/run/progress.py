"""How far the runs are: one line that is redrawn on a terminal, now and then a plain line elsewhere."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Display", "Tally", "duration"]

PLAIN_EVERY = 10.0  # seconds between plain lines
REDRAW_EVERY = 0.5


@dataclass
class _Run:
    """A run at work. The rate counts from the first step that was seen: a resumed run begins in the middle."""

    step: int
    steps: int
    loss: float
    first: int
    since: float = field(default_factory=lambda: time.monotonic())

    @property
    def rate(self) -> float:
        passed = time.monotonic() - self.since
        return (self.step - self.first) / passed if passed > 0 else 0.0

    def __str__(self) -> str:
        loss = f", loss {self.loss:.3g}" if math.isfinite(self.loss) else ""
        rate = f", {self.rate:.3g} steps/s" if self.rate else ""
        return f"step {self.step} of {self.steps}{loss}{rate}"


class Tally:
    """Which runs have ended and how far the others are. `weights`: how long each should take, in any unit."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights, self.ended = dict(weights), set[str]()
        self.running: dict[str, _Run] = {}
        self.since = time.monotonic()
        self.credit: dict[str, float] = {}  # what resumed runs had done before

    def note(self, name: str, step: int, steps: int, loss: float, first: int | None = None) -> None:
        """`first`: the step at which this training began, if it is not this one."""
        if name in self.ended:
            return
        run = self.running.get(name)
        if run is None or step < run.step or run.steps != steps:  # new, started again, or its next training
            first = step if first is None else first
            self.running[name] = run = _Run(step, steps, loss, step)
            if first > 1:
                self.credit[name] = self.weights[name] * first / steps
        run.step, run.loss = step, loss

    def end(self, name: str) -> None:
        self.running.pop(name, None)
        self.ended.add(name)

    def done(self) -> float:
        """The part of all work that is done, 0 to 1."""
        at_work = sum(self.weights[name] * run.step / max(run.steps, 1) for name, run in list(self.running.items()))
        ended = sum(self.weights[name] for name in list(self.ended))
        return min(1.0, (ended + at_work) / (sum(self.weights.values()) or 1.0))

    def left(self) -> float | None:
        """Seconds left at the pace so far; None before there is one."""
        done, credit = self.done(), sum(list(self.credit.values())) / (sum(self.weights.values()) or 1.0)
        passed = time.monotonic() - self.since
        return passed * (1 - done) / (done - credit) if done - credit > 1e-3 and passed > 1 else None

    def __str__(self) -> str:
        running = list(self.running.values())
        words = f"{len(self.ended)} of {len(self.weights)} runs"
        if len(running) == 1:
            words += f", {running[0]}"
        elif running:
            words += f", {len(running)} at work"
        left = self.left()
        return words if left is None or not self.waiting else f"{words}, {duration(left)} left"

    @property
    def waiting(self) -> int:
        return len(self.weights) - len(self.ended)


def duration(seconds: float) -> str:
    """
    >>> duration(42), duration(150), duration(9000)
    ('42 s', '2 min 30 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


class Display:
    """Shows a tally while it is open. `poll` is called before each look."""

    def __init__(self, tally: Tally, show: bool = True) -> None:
        self.tally, self.show = tally, show
        self.poll: Callable[[], None] = lambda: None
        self.closed = threading.Event()
        self.bar: Progress | None = None

    def __enter__(self) -> Display:
        if self.show and sys.stdout.isatty():
            self.bar = _bar()
            self.bar.start()
            self.bar.add_task("", total=1.0, text="")
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.closed.set()
        self.thread.join()
        if self.bar is not None:
            self._draw(self.bar)
            self.bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self.show:
            return
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def _watch(self) -> None:
        while not self.closed.wait(REDRAW_EVERY if self.bar is not None else PLAIN_EVERY):
            with contextlib.suppress(OSError):  # a broken pipe or a poll that comes too late must not end the runs
                self.poll()
                if self.bar is not None:
                    self._draw(self.bar)
                else:
                    self.say(f"{self.tally.done():4.0%}  {self.tally}")

    def _draw(self, bar: Progress) -> None:
        bar.update(bar.task_ids[0], completed=self.tally.done(), text=str(self.tally))


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(
        BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f}%"), TextColumn("{task.fields[text]}"), expand=False
    )
