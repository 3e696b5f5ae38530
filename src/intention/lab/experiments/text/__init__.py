"""Language modelling: bits per character of a text, for each mixer of the language model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure, Place, chooses
from intention.lab.experiments.sequences import MIXERS, OURS, check, check_heads, plan
from intention.lab.experiments.text import task as texts
from intention.lab.experiments.text.claims import claims
from intention.lab.experiments.text.figures import plot
from intention.lab.experiments.text.task import Text, Windows
from intention.nn import InformerLM

__all__ = ["EXCLUSIVE", "PLACE", "PRESETS", "READING", "SECONDS", "TITLE", "Config", "claims", "jobs", "plot", "run"]

TITLE = "Characters of a text"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 65, "standard": 1500}  # on one core, all runs
READING = """
- The paper has no such experiment. The text is a file of yours in UTF-8 (`--text FILE`) or, without one, what comes
  with Python: its licence, the topics of its help and the docstrings of its modules, by the names of the modules, each
  text once: over a megabyte that is there without a network. It differs a little between versions of Python; rows say
  which one it was.
- The first 90% are to learn from, the last 10% are held out. Pieces of a fixed length are drawn at random places; bits
  per character are means over pieces of the held-out part, evenly spread, with their 95% intervals over pieces. The
  first characters of a piece have little before them, for all models alike.
- The model is `InformerLM` with rotary positions, which differ in nothing but the mixer. The weights of embedding and
  output are tied.
- All models get the same pieces, the same number of steps and the same learning rate (`learning_rate`). That of
  `quick` is the best for attention of 0.001, 0.003 and 0.01 (seed 0); that of `standard` was not searched.
- With this little training the order of the models is that of the first minutes, not of the end.
- "Counted pairs of characters" is no network: how often a character followed the one before it, one added to each.
- `paper` is `standard`.
"""

SAMPLE = 200  # characters that are written after the beginning of the held-out part
PROMPT = 50


@dataclass(frozen=True)
class Config:
    """Characters of a text."""

    models: tuple[str, ...] = chooses(MIXERS)
    seeds: int = chooses(2)
    text: str = ""  # a file in UTF-8. Default: licence and documentation of Python
    steps: int = 900
    batch: int = 8
    window: int = 128  # characters
    width: int = 64
    heads: int = 4
    layers: int = 4
    learning_rate: float = 3e-3
    clip: float = 1.0
    evaluation_windows: int = 200
    evaluations: int = 5  # during training

    def __post_init__(self) -> None:
        check(self, MIXERS, window=1, evaluation_windows=2)
        check_heads(self.width, self.heads)


STANDARD = Config()
QUICK = replace(STANDARD, steps=300, window=64, width=32, heads=2, layers=2, learning_rate=1e-2, evaluation_windows=100)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    """A text of the user is read here, so that one that does not serve fails before any work; its digest names runs."""
    at = {"text": texts.load(config.text, config.window).digest} if config.text else {}
    models = (*config.models, "references")
    return [Job("text", config, model, seed, at) for seed in range(config.seeds) for model in models]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    text = texts.load(config.text, config.window)
    held_out = texts.spread(text.unseen, config.evaluation_windows, config.window)
    data = {"text": text.name, "characters": len(text.seen) + len(text.unseen)}
    if job.model == "references":
        yield _measure(texts.bits_of_pairs(text, held_out), data, "counted_pairs")
        return
    torch.manual_seed(job.seed)
    model = InformerLM(len(text.characters), config.width, config.heads, config.layers, mixer=job.model)
    sample = partial(texts.sample, text.seen, window=config.window)
    measured = lambda model: {"bits": float(_bits(model, held_out).mean())}  # noqa: E731
    for entry in train(model, sample, loss, plan(config), seed=job.seed, place=place, evaluate=measured):
        yield Measure("bits during training", entry["bits"], entry["step"], data=data)
    yield _measure(_bits(model, held_out), data)
    yield Measure("sample", None, data={**data, **_sample(model, text, job.seed)})


def loss(model: nn.Module, drawn: Windows) -> Tensor:
    logits = model(drawn.tokens[:, :-1])[0]
    return TF.cross_entropy(logits.flatten(0, 1), drawn.tokens[:, 1:].flatten())


@torch.no_grad()
def _bits(model: nn.Module, windows: Windows, size: int = 25) -> Tensor:
    """Bits per character of each piece."""
    parts = []
    for tokens in windows.tokens.split(size):
        logits = model(tokens[:, :-1])[0]
        parts.append(TF.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(-1) / math.log(2))
    return torch.cat(parts)


def _measure(bits: Tensor, data: dict[str, object], model: str | None = None) -> Measure:
    mean, half = float(bits.mean()), 1.96 * float(bits.std()) / len(bits) ** 0.5
    return Measure("bits per character", mean, None, (mean - half, mean + half), data, model)


def _sample(model: InformerLM, text: Text, seed: int) -> dict[str, str]:
    """What the model writes after the beginning of the held-out part."""
    prompt = text.unseen[None, :PROMPT]
    written = model.generate(prompt, SAMPLE, generator=torch.Generator().manual_seed(seed))[0]
    return {"prompt": text.read(prompt[0]), "sample": text.read(written[prompt.shape[1] :])}
