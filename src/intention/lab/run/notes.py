"""What the worker processes of one machine tell their parent: small files in a private folder, one set per run."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Notes"]


@dataclass(frozen=True)
class Notes:
    """A private folder. It can be sent to a worker; pickles in it come from our own workers only."""

    folder: Path

    def start(self, index: int) -> None:
        with contextlib.suppress(OSError):
            (self.folder / f"{index}.step").write_text("0 1 nan 0")

    def started(self, index: int) -> bool:
        return (self.folder / f"{index}.step").exists()

    def clear(self, index: int) -> None:
        (self.folder / f"{index}.step").unlink(missing_ok=True)

    def step(self, index: int) -> tuple[int, int, float, int] | None:
        """Step, number of steps, loss and first step of a run; None if it has not started or writes just now."""
        try:
            step, steps, loss, first = (self.folder / f"{index}.step").read_text().split()
            return int(step), int(steps), float(loss), int(first)
        except (OSError, ValueError):
            return None

    def keep(self, index: int, outcome: object) -> None:
        """A result, before it is sent: it is not lost if another worker is killed while it is on its way."""
        part = self.folder / f"{index}.part"
        with contextlib.suppress(OSError):  # a full disk: the outcome is sent anyway
            part.write_bytes(pickle.dumps(outcome))
            os.replace(part, self.folder / f"{index}.end")

    def kept(self, index: int) -> Any:
        try:
            return pickle.loads((self.folder / f"{index}.end").read_bytes())
        except OSError:
            return None

    def stop(self) -> None:
        """Ask all workers to stop."""
        (self.folder / "stop").touch()

    @property
    def stopping(self) -> bool:
        return (self.folder / "stop").exists()

    def teller(self, index: int) -> Callable[[int, int, Mapping[str, float]], None]:
        """For `Place.tell` in a worker: notes the step twice a second.

        Where the run should stop, because it is asked to or its parent is gone, it sends this process the signal of
        Ctrl-C, which the training loop obeys after saving a checkpoint.
        """
        parent, next_look, first, before = os.getppid(), 0.0, 0, 0

        def tell(step: int, steps: int, values: Mapping[str, float]) -> None:
            nonlocal next_look, first, before
            if before == 0 or step < before:  # a training begins
                first = step
            before, now = step, time.monotonic()
            if now < next_look:
                return
            next_look = now + 0.5
            if os.getppid() != parent or self.stopping:
                next_look = float("inf")  # once is enough: a second signal would not wait for the checkpoint
                signal.raise_signal(signal.SIGINT)
                return
            loss = values.get("loss", float("nan"))
            with contextlib.suppress(OSError):
                (self.folder / f"{index}.step").write_text(f"{step} {steps} {loss} {first}")

        return tell
