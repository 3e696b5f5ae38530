"""What an experiment is: a folder with a frozen Config, presets, runs that stand alone, and readers of their rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from intention.lab.core.place import Place
from intention.lab.core.results import Json, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "COLOURS",
    "HOLDS",
    "LABELS",
    "NOT",
    "OPEN",
    "OUR_LINE",
    "PRESETS",
    "UNTESTED",
    "VERDICTS",
    "Cases",
    "Claim",
    "Experiment",
    "Job",
    "MamlNet",
    "Measure",
    "Net",
    "Place",
    "Plot",
    "added",
    "cases",
    "check_scale",
    "chooses",
    "data_name",
    "label",
    "relevant",
    "require",
    "score",
    "tally",
    "without_added",
]

T = TypeVar("T")
PRESETS = ("quick", "standard", "paper")

# Colours of the report; they can be told apart on white, on black and by the colour-blind.
COLOURS = {
    "intention": "#E08A00",
    "sigma_intention": "#D6336C",
    "linear_attention": "#1C9E77",
    "attention": "#2F7FD1",
    "neural_process": "#9B59B6",
    "mlp": "#7F8C8D",
    "maml": "#B5651D",
    "maml_first": "#C39B77",
    "intention_longer": "#A35F00",
    "intention_ce": "#C9A800",
    "intention_kernel": "#E4572E",
    "intention_lda": "#5E6AD2",
    "intention_qda": "#20A4B8",
    "protonet": "#5A9E2F",
    "pretrained": "#A0A0A0",
    "informer": "#8A5A00",
    "transformer": "#2F7FD1",
    "delta": "#7A4FBF",
    "gated_delta": "#12A5B5",
}
LABELS = {
    "intention": "Intention",
    "sigma_intention": "σIntention",
    "linear_attention": "Linear attention",
    "attention": "Attention",
    "neural_process": "Neural Process",
    "mlp": "MLP",
    "maml": "MAML",
    "maml_first": "MAML (first order)",
    "intention_longer": "Intention (trained further)",
    "intention_ce": "Intention (cross-entropy)",
    "intention_kernel": "Intention-kernel",
    "intention_lda": "Intention-LDA (the printed “QDA”: pooled)",
    "intention_qda": "Intention-QDA (one covariance per class)",
    "protonet": "ProtoNet",
    "pretrained": "Frozen features (LS-SVM)",
    "informer": "Informer",
    "transformer": "Transformer",
    "delta": "Delta rule",
    "gated_delta": "Gated delta rule",
}
for mixer in ("intention", "sigma_intention", "attention", "linear_attention", "delta", "gated_delta"):
    COLOURS[f"{mixer}_gated"] = COLOURS[mixer]
    LABELS[f"{mixer}_gated"] = f"{LABELS[mixer]}, gated layers"

HEADS = ("intention", "sigma_intention", "attention", "neural_process", "protonet", "maml")
for model in (*HEADS, "intention_kernel", "intention_lda", "intention_qda"):
    COLOURS[f"{model}_tuned"] = COLOURS[model]
    LABELS[f"{model}_tuned"] = f"{LABELS[model]}, from one encoder"

DATA_NAMES = {
    "built-in": "built-in data (glyphs)",
    "mnist": "MNIST",
    "miniimagenet": "miniImageNet at 28×28",
    "miniimagenet-64": "miniImageNet at 28×28, split 64/16/20",
    "cifar100-features": "CIFAR-100, features of a MobileNetV2",
}


def data_name(data: str) -> str:
    """A data set as people read it; that of a user is called as its file or folder."""
    return DATA_NAMES.get(data, data)


def label(model: str) -> str:
    """A model's name as people read it."""
    return LABELS.get(model, model.replace("_", " "))


def chooses(default: T) -> T:
    """A field of a Config that says which runs there are, and changes none of them (models, seeds, sizes)."""
    return field(default=default, metadata={"chooses": True})


Scale = Literal["none", "variance"]
SCALES: tuple[Scale, ...] = ("none", "variance")


def check_scale(scale: str) -> None:
    require(scale in SCALES, f"scale must be one of {', '.join(SCALES)}, got {scale!r}")


def added(default: T) -> T:
    """A field that came after rows were published: at its default it changes no run, and its name is not in their ids.

    Rows of before have no such field: for them it is at its default, whatever the presets say now.
    """
    return field(default=default, metadata={"added": True})


@dataclass(frozen=True)
class Net:
    """One model: the sizes of its layers (input sizes follow from the task) and how fast it learns."""

    embed: tuple[int, ...]
    decode: tuple[int, ...] = ()
    learning_rate: float = 3e-4
    heads: int = 1
    scale: Scale = added("none")  # of σIntention's scores

    def __post_init__(self) -> None:
        require(all(size > 0 for size in (*self.embed, *self.decode)), f"sizes must be positive, got {self}")
        require(self.heads >= 1, f"heads must be at least 1, got {self.heads}")
        check_scale(self.scale)


@dataclass(frozen=True)
class MamlNet:
    """The network, and the gradient steps that it takes on each context."""

    layers: tuple[int, ...] = (128, 128, 128, 128, 1)
    inner_steps: int = 3
    inner_rate: float = 0.01
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        require(all(size > 0 for size in self.layers), f"sizes must be positive, got {self.layers}")
        require(self.inner_steps >= 0, f"inner_steps must be at least 0, got {self.inner_steps}")
        require(0 <= self.inner_rate < math.inf, f"inner_rate must be >= 0 and finite, got {self.inner_rate}")


@dataclass(frozen=True)
class Job:
    """One run: the smallest piece of an experiment that is repeated, resumed or sent to another machine.

    `at` holds what else is varied besides model and seed, by name: {"d": 4, "size": 32}.
    """

    experiment: str
    config: Any
    model: str
    seed: int
    at: Json = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Names the run: equal for equal work, whatever other runs are asked for beside it."""
        used = json.dumps([relevant(self.config, self.model), dict(self.at)], sort_keys=True, default=str)
        words = [self.model, *(f"{name}{value}" for name, value in self.at.items()), f"seed{self.seed}"]
        return "-".join([*words, hashlib.sha256(used.encode()).hexdigest()[:8]])


def relevant(config: Any, model: str) -> Json:
    """The fields that a run of this model depends on: not what chooses runs, not the sizes of other models.

    A field whose value is a dataclass belongs to the model of its name.
    """
    kept: Json = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if item.metadata.get("chooses"):
            continue
        if not dataclasses.is_dataclass(value):
            kept[item.name] = value
        elif item.name == model and not isinstance(value, type):
            kept[item.name] = dataclasses.asdict(value)
    return without_added(kept, config)


def without_added(values: Json, config: Any) -> Json:
    """Names and values of a config, or of a part of it, without fields that were added later and are at their default.

    `config` says which fields these are; in a file of JSON tuples have become lists.
    """
    fields = {item.name: item for item in dataclasses.fields(config)}
    kept: Json = {}
    for name, value in values.items():
        inner = getattr(config, name, None)
        if isinstance(value, Mapping) and dataclasses.is_dataclass(inner):
            value = without_added(dict(value), inner)
        item = fields.get(name)
        if item is None or not item.metadata.get("added") or not _same(value, item.default):
            kept[name] = value
    return kept


def _same(value: object, default: object) -> bool:
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        default = without_added(dataclasses.asdict(default), default)
    return json.dumps(value, default=str, sort_keys=True) == json.dumps(default, default=str, sort_keys=True)


@dataclass(frozen=True)
class Measure:
    """What a run yields; the runner adds experiment, config, seed and versions and makes it a `Row`.

    `model` where one run measures several (closed-form references beside a trained model).
    """

    metric: str
    value: float | None
    x: float | None = None
    interval: tuple[float, float] | None = None
    data: Json | None = None
    model: str | None = None


HOLDS, NOT, OPEN, UNTESTED = "holds", "does not hold", "not decided", "not tested at this size"
MIXED = "holds in some cases"  # what verdicts such as "holds in 3 of 5" are counted as
VERDICTS = (HOLDS, MIXED, NOT, OPEN, UNTESTED)
OUR_LINE = "our own line"
_CASES = re.compile(r"holds in (\d+) of (\d+)(?: \((\d+) open\))?")


class Cases(NamedTuple):
    """Of how many cases a claim is about, in how many it holds, and how many are not decided or not tested."""

    held: int
    all: int
    open: int = 0

    def __str__(self) -> str:
        """
        >>> print(Cases(3, 5), Cases(3, 5, 1), sep="; ")
        holds in 3 of 5; holds in 3 of 5 (1 open)
        """
        return f"holds in {self.held} of {self.all}" + (f" ({self.open} open)" if self.open else "")


def cases(verdict: str) -> Cases:
    """What a verdict says of its cases; a plain one is of one case."""
    found = _CASES.fullmatch(verdict)
    if found:
        return Cases(*(int(number or 0) for number in found.groups()))
    if verdict not in VERDICTS or verdict == MIXED:
        wanted = f"{HOLDS!r}, {NOT!r}, {OPEN!r}, {UNTESTED!r} or {str(Cases(3, 5, 1))!r}"
        raise ValueError(f"a verdict is {wanted}, got {verdict!r}")
    return Cases(verdict == HOLDS, 1, verdict in (OPEN, UNTESTED))


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper or of our own, what we measured (numbers with their intervals) and the verdict.

    The verdict is one of "holds", "does not hold", "not decided" (the interval over seeds allows both), "not tested at
    this size" (not run, or a baseline did not learn), or says in how many cases it holds: "holds in 3 of 5".
    """

    text: str
    where: str  # "Figure 5", "section 2", "appendix C"; ends with "our own line" where the paper does not say it
    measured: str
    verdict: str

    def __post_init__(self) -> None:
        cases(self.verdict)

    @property
    def ours(self) -> bool:
        """Whether this is a line of our own: these are counted and headed apart from the claims of the paper."""
        return self.where.endswith(OUR_LINE)

    @property
    def kind(self) -> str:
        """One of `VERDICTS`."""
        return self.verdict if self.verdict in VERDICTS else MIXED

    @property
    def final(self) -> bool:
        """Whether more training or more seeds could not change the verdict: no case is open."""
        return cases(self.verdict).open == 0


def tally(claims: Iterable[Claim]) -> dict[str, int]:
    """How many claims there are of each kind, in the order of `VERDICTS`."""
    kinds = [claim.kind for claim in claims]
    return {verdict: kinds.count(verdict) for verdict in VERDICTS}


@dataclass(frozen=True)
class Plot:
    """A figure of the report: `draw` returns a matplotlib figure. `table`: rows of text, the first is the heading."""

    title: str
    caption: str
    draw: Callable[[], Figure] | None = None
    table: Sequence[Sequence[str]] | None = None


class Experiment(Protocol):
    """What each folder here offers."""

    __name__: str
    TITLE: str
    PLACE: str  # the paper's figures, tables and sections
    READING: str  # Markdown: how the paper's gaps are read, what is published that it leaves out
    EXCLUSIVE: bool  # times things: nothing else runs meanwhile
    SECONDS: Mapping[str, float]  # what a preset takes on one core, where it was measured
    PRESETS: Mapping[str, Any]
    Config: type

    @staticmethod
    def jobs(config: Any) -> Iterable[Job]: ...
    @staticmethod
    def run(job: Job, place: Place) -> Iterator[Measure]: ...
    @staticmethod
    def claims(rows: Sequence[Row]) -> list[Claim]: ...
    @staticmethod
    def finding(rows: Sequence[Row]) -> str: ...  # one sentence for anybody, from these rows; "" if they do not tell
    @staticmethod
    def plot(rows: Sequence[Row]) -> list[Plot]: ...


def score(experiment: Experiment) -> str:
    """The metric, the smaller the better, by which a search for learning rates chooses."""
    return getattr(experiment, "SCORE", "mse")


def require(condition: bool, message: str) -> None:
    """For `Config.__post_init__`: impossible values fail before any work, with what came and what is wanted."""
    if not condition:
        raise ValueError(message)
