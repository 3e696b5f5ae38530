"""The one training loop: schedule, clipping, held-out evaluation, checkpoints, data-parallel under torchrun."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

import torch
from torch import Tensor, nn

from intention.lab.core import checkpoint, ranks
from intention.lab.core.checkpoint import State
from intention.lab.core.device import moved
from intention.lab.core.files import LabError
from intention.lab.core.place import Place

__all__ = ["Diverged", "Plan", "train"]

Batch = TypeVar("Batch", bound=tuple[Tensor, ...])  # an Episode, say: the tasks in front
Sample = Callable[[int, torch.Generator], Batch]  # (batch, generator) -> tasks
Loss = Callable[[nn.Module, Batch], Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]

TASKS = 2_000_000  # seeds of training tasks begin here
SCHEDULES = ("cosine", "constant", "decay")
OPTIMISERS = ("adam", "sgd", "nesterov")
MOMENTUM = 0.9  # of "sgd" and "nesterov"


class Diverged(LabError):
    """A loss that is not a finite number."""


@dataclass(frozen=True)
class Plan:
    """How a model is trained."""

    steps: int
    batch: int
    learning_rate: float
    schedule: str = "cosine"
    warmup: int = 0  # steps over which the rate rises from 0, with any schedule
    decay_period: int = 10_000  # of "decay": 0.8 ** (t / period - 1) from t = period on
    clip: float = 1.0  # largest norm of the gradient; 0 is none
    evaluate_every: int = 0  # steps; 0 is at the start and at the end only
    optimiser: str = "adam"
    weight_decay: float = 0.0  # "sgd", "nesterov": added to the gradient before momentum; "adam": decoupled (AdamW)
    keep: str = ""  # what of the evaluations is largest for the weights that are kept; "" is the last weights

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        if self.optimiser not in OPTIMISERS:
            raise ValueError(f"optimiser must be one of {OPTIMISERS}, got {self.optimiser!r}")
        for name, least in (("steps", 1), ("batch", 1), ("warmup", 0), ("decay_period", 1), ("evaluate_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        if not 0 <= self.clip < math.inf:
            raise ValueError(f"clip must be >= 0 and finite, got {self.clip}; 0 is no clipping")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be >= 0 and finite, got {self.weight_decay}")

    def rate(self, step: int) -> float:
        """The learning rate of a step, 0 the first. It depends on the step alone, so a resumed run has the same."""
        factor = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        if self.schedule == "cosine":
            factor *= 0.5 * (1 + math.cos(math.pi * step / self.steps))
        if self.schedule == "decay":
            factor *= 0.8 ** max(0.0, step / self.decay_period - 1)
        return self.learning_rate * factor


def train(
    model: nn.Module,
    sample: Sample[Batch],
    loss: Loss[Batch],
    plan: Plan,
    *,
    seed: int,
    place: Place,
    evaluate: Evaluate | None = None,
) -> list[dict[str, float]]:
    """Train the model in place, on the device of the place, where it stays.

    The history is returned: {"step": ..., what evaluate gave}, for step 0, every `evaluate_every` steps and the end.
    With a folder, a checkpoint found in it is continued bit by bit; new ones are written every `place.save_every`
    seconds, at the end and when the user presses Ctrl-C. With `plan.keep` the model ends with the weights whose
    evaluation was best.
    """
    ranks.join()
    model.to(place.device)
    optimiser = _optimiser(model, plan)
    # not the stream from which a caller with the same seed has drawn the weights
    state = State(model, optimiser, torch.Generator().manual_seed(TASKS + seed), 0, [])
    settings = {"seed": seed, **dataclasses.asdict(plan)}
    path = None if place.folder is None else place.folder / checkpoint.NAME
    if path is not None and path.exists():
        checkpoint.load(path, state, settings)
    if ranks.agree(state.step) != state.step:
        raise LabError(f"the ranks have different checkpoints in {path}; use a folder that all of them see")
    started_at, saved = state.step, time.monotonic()
    wrapped = ranks.wrap(model)
    with _events(place, state.step) as write, _interruptible() as interrupted:
        while True:
            if _due(state, plan) and evaluate is not None:
                _evaluate(state, evaluate, write, plan.keep)
            stop = state.step >= plan.steps or bool(interrupted)
            late = time.monotonic() - saved > place.save_every
            if path is not None and ranks.first() and (late or (stop and state.step > started_at)):
                checkpoint.save(path, state, settings)
                saved = time.monotonic()
            if interrupted:
                raise KeyboardInterrupt
            if stop:
                if state.best is not None:
                    model.load_state_dict(state.best)
                return state.history
            value = _step(wrapped, state, sample, loss, plan, place.device)
            write({"loss": value, "learning rate": plan.rate(state.step - 1)}, state.step)
            if place.tell is not None:
                place.tell(state.step, plan.steps, {"loss": value})


def _optimiser(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    weights = [weight for weight in model.parameters() if weight.requires_grad]  # frozen ones have no state to save
    if plan.optimiser in ("sgd", "nesterov"):
        ahead = plan.optimiser == "nesterov"
        decay = plan.weight_decay
        return torch.optim.SGD(weights, plan.learning_rate, momentum=MOMENTUM, weight_decay=decay, nesterov=ahead)
    if plan.weight_decay:
        return torch.optim.AdamW(weights, plan.learning_rate, weight_decay=plan.weight_decay)
    return torch.optim.Adam(weights, plan.learning_rate)


def _step(
    model: nn.Module, state: State, sample: Sample[Batch], loss: Loss[Batch], plan: Plan, device: torch.device
) -> float:
    for group in state.optimiser.param_groups:
        group["lr"] = plan.rate(state.step)
    state.optimiser.zero_grad(set_to_none=True)
    out = loss(model, moved(ranks.share(sample(plan.batch, state.generator)), device))
    value = ranks.mean(float(out.detach()))  # of all ranks, so that all of them stop if it is not finite
    if not math.isfinite(value):
        raise Diverged(
            f"the loss is {value} at step {state.step} of {plan}; try a smaller learning rate, or clip > 0. A "
            "checkpoint, where there is one, is from before"
        )
    out.backward()
    if plan.clip:
        nn.utils.clip_grad_norm_(state.model.parameters(), plan.clip)
    state.optimiser.step()
    state.step += 1
    return value


def _due(state: State, plan: Plan) -> bool:
    if state.history and state.history[-1]["step"] == state.step:
        return False  # a checkpoint that was written after this evaluation
    regular = plan.evaluate_every > 0 and state.step % plan.evaluate_every == 0
    return regular or state.step in (0, plan.steps)


def _evaluate(state: State, evaluate: Evaluate, write: Callable[[Mapping[str, float], int], None], keep: str) -> None:
    training = state.model.training
    state.model.eval()
    with torch.no_grad():
        values = {name: float(value) for name, value in evaluate(state.model).items()}
    state.model.train(training)
    state.history.append({"step": state.step, **values})
    if keep and values[keep] >= max(entry[keep] for entry in state.history):
        state.best = {name: tensor.detach().clone() for name, tensor in state.model.state_dict().items()}
    write(values, state.step)


@contextmanager
def _events(place: Place, step: int) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """TensorBoard event files; a resumed run replaces what was written after its checkpoint."""
    if not place.tensorboard or place.folder is None or not ranks.first():
        yield lambda values, step: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(place.folder / "events"), purge_step=step) as writer:

        def write(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield write


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Ctrl-C is noted and obeyed between two steps, where the state is whole; a second one stops at once.

    Not with several ranks (they would wait for one another) nor outside the main thread (Python allows no handler).
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread() or ranks.count() > 1:
        yield noted
        return

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)
