"""Language modelling: bits per character of a text, for each mixer of the language model, in plain and gated layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab.core.device import answer
from intention.lab.core.train import Plan, train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.sequences import GATED, MIXERS, OURS, RATES, Gated, check, check_heads, plan
from intention.lab.experiments.text import task as texts
from intention.lab.experiments.text.claims import METRIC, claims, finding
from intention.lab.experiments.text.figures import plot
from intention.lab.experiments.text.parts import ABLATED, ABLATION, PARTS
from intention.lab.experiments.text.task import Text, Windows
from intention.nn import InformerLM

__all__ = [
    "EXCLUSIVE",
    "PLACE",
    "PRESETS",
    "RATES",
    "READING",
    "SCORE",
    "SECONDS",
    "TITLE",
    "Config",
    "claims",
    "finding",
    "jobs",
    "plot",
    "run",
]

TITLE = "Characters of a text"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 35, "standard": 5400}  # on one core, all runs
SCORE = METRIC  # of a search
MODELS = (*MIXERS, *GATED)
READING = """
- The paper has no such experiment. The text is a file of yours in UTF-8 (`--text FILE`) or, without one, what comes
  with Python: its licence, the topics of its help and the docstrings of its modules, by the names of the modules, each
  text once: over a megabyte that is there without a network. It differs a little between versions of Python; rows say
  which one it was.
- The first 90% are to learn from, the last 10% are held out. Pieces of a fixed length are drawn at random places; bits
  per character are means over pieces of the held-out part, evenly spread, with their 95% intervals over pieces. The
  first characters of a piece have little before them, for all models alike.
- The model is `InformerLM`. Plain layers have a mixer with bare projections and rotary positions, and differ in nothing
  but the mixer. Gated layers (`nn.GatedIntention`) have a short convolution with SiLU, unit queries and keys, input and
  forgetting gates where the mixer can use them, and an output gate; softmax attention has rotary positions besides, and
  linear attention a norm of what it reads. The numbers of parameters of gated models are within 3% of each other. The
  weights of embedding and output are tied.
- All models get the same pieces and the same number of steps. Plain models share one learning rate (`learning_rate`):
  that of `quick` is the best for attention of 0.001, 0.003 and 0.01 (seed 0); that of `standard` was not searched. The
  rates of gated models were searched for each on one grid, 0.001, 0.003, 0.01 and 0.03, with a third of the steps of
  `standard`, a seed that is not published and no weight decay: 0.01 is the best for all six. Their weight decay is
  0.1: of 0, 0.1 and 0.3, tried with all steps and that seed, the best for Intention (2.696, 2.675 and 2.684 bits) and
  for the gated delta rule (2.680, 2.631 and 2.668), which gains more; without it they had 2.695 and 2.678 over five
  seeds.
- The parts of the gated layer are changed one at a time, with a third of the training (`ablation_steps`).
- With this little training the order of the models is that of the first minutes, not of the end.
- "Counted pairs of characters" is no network: how often a character followed the one before it, one added to each.
- `paper` is `standard`.
"""

SAMPLE = 200  # characters that are written after the beginning of the held-out part
PROMPT = 50


@dataclass(frozen=True)
class Config:
    """Characters of a text."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(5)  # of gated layers
    plain_seeds: int = chooses(2)
    parts: tuple[str, ...] = chooses(tuple(PARTS))  # of a gated layer, changed one at a time
    ablation_steps: int = chooses(300)
    ablation_seeds: int = chooses(2)
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
    intention_gated: Gated = Gated(weight_decay=0.1)
    sigma_intention_gated: Gated = Gated(weight_decay=0.1)
    attention_gated: Gated = Gated(weight_decay=0.1)
    linear_attention_gated: Gated = Gated(weight_decay=0.1)
    delta_gated: Gated = Gated(weight_decay=0.1)
    gated_delta_gated: Gated = Gated(weight_decay=0.1)

    def __post_init__(self) -> None:
        check(self, MODELS, window=1, evaluation_windows=2, plain_seeds=1, ablation_seeds=1, ablation_steps=1)
        unknown = set(self.parts) - set(PARTS)
        require(not unknown, f"there is no part {', '.join(sorted(unknown))} to change; there are {', '.join(PARTS)}")
        check_heads(self.width, self.heads)


STANDARD = Config()
QUICK = replace(
    STANDARD,
    seeds=1,
    plain_seeds=1,
    parts=(),
    steps=150,
    window=64,
    width=32,
    heads=2,
    layers=2,
    learning_rate=1e-2,
    evaluation_windows=100,
)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    """A text of the user is read here, so that one that does not serve fails before any work; its digest names runs."""
    at = {"text": texts.load(config.text, config.window).digest} if config.text else {}
    plain = [name for name in config.models if name not in GATED]
    gated = [name for name in config.models if name in GATED]
    found = [Job("text", config, name, seed, at) for seed in range(config.seeds) for name in (*gated, "references")]
    found += [Job("text", config, name, seed, at) for seed in range(config.plain_seeds) for name in plain]
    if ABLATED in gated:
        changed = [{**at, "part": part, "steps": config.ablation_steps} for part in config.parts]
        found += [Job("text", config, ABLATED, seed, one) for seed in range(config.ablation_seeds) for one in changed]
    return found


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    text = texts.load(config.text, config.window)
    held_out = texts.spread(text.unseen, config.evaluation_windows, config.window)
    data = {"text": text.name, "characters": len(text.seen) + len(text.unseen)}
    if job.model == "references":
        yield _measure(texts.bits_of_pairs(text, held_out), data, "counted_pairs")
        return
    model = _built(job, len(text.characters))
    sample = partial(texts.sample, text.seen, window=config.window)
    measured = lambda model: {"bits": float(_bits(model, held_out).mean())}  # noqa: E731
    entries = train(model, sample, loss, _plan(job), seed=job.seed, place=place, evaluate=measured)
    bits = _bits(model, held_out)
    if "part" in job.at:
        data = {**data, "part": job.at["part"], "steps": job.at["steps"]}
        yield replace(_measure(bits, data), metric=ABLATION)
        return
    data["parameters"] = sum(weight.numel() for weight in model.parameters())
    for entry in entries:
        yield Measure("bits during training", entry["bits"], entry["step"], data=data)
    yield _measure(bits, data)
    yield Measure("sample", None, data={**data, **_sample(model, text, job.seed)})


def _built(job: Job, vocabulary: int) -> InformerLM:
    config: Config = job.config
    torch.manual_seed(job.seed)
    sizes = (vocabulary, config.width, config.heads, config.layers)
    if job.model not in GATED:
        return InformerLM(*sizes, mixer=job.model)
    return InformerLM(*sizes, mixer=GATED[job.model], layer="gated", **PARTS.get(job.at.get("part", ""), {}))


def _plan(job: Job) -> Plan:
    config: Config = job.config
    if job.model not in GATED:
        return plan(config)
    steps = job.at.get("steps", config.steps)
    own: Gated = getattr(config, job.model)
    return plan(replace(config, steps=steps), own.learning_rate, own.weight_decay)


def loss(model: nn.Module, drawn: Windows) -> Tensor:
    logits = model(drawn.tokens[:, :-1], need_streams=False)[0]
    return TF.cross_entropy(logits.flatten(0, 1), drawn.tokens[:, 1:].flatten())


@torch.no_grad()
def _bits(model: nn.Module, windows: Windows, size: int = 25) -> Tensor:
    """Bits per character of each piece."""
    parts = []
    for tokens in windows.tokens.split(size):
        logits = answer(model, tokens[:, :-1], need_streams=False)
        parts.append(TF.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").mean(-1) / math.log(2))
    return torch.cat(parts)


def _measure(bits: Tensor, data: dict[str, object], model: str | None = None) -> Measure:
    mean, half = float(bits.mean()), 1.96 * float(bits.std()) / len(bits) ** 0.5
    return Measure(METRIC, mean, None, (mean - half, mean + half), data, model)


def _sample(model: InformerLM, text: Text, seed: int) -> dict[str, str]:
    """What the model writes after the beginning of the held-out part."""
    prompt = text.unseen[None, :PROMPT]
    written = model.cpu().generate(prompt, SAMPLE, generator=torch.Generator().manual_seed(seed))[0]
    return {"prompt": text.read(prompt[0]), "sample": text.read(written[prompt.shape[1] :])}
