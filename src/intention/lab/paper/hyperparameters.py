"""Every hyperparameter that the paper prints, with our value in the `paper` preset and why where it differs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from intention.lab import experiments
from intention.lab.paper import images
from intention.lab.paper.lines import NOT_PRINTED, SAME, UNPRINTED, UNPRINTED_LENGTH, Entry, Row, net, rows

__all__ = ["ROWS", "table", "value"]

PI = 3.141592653589793


def value(row: Row) -> object:
    """Our value, read where the experiment reads it."""
    if not row.path:
        return row.expected
    experiment = experiments.find(row.experiment)
    module, _, fields = row.path.rpartition(":")
    found: Any = importlib.import_module(f"{experiment.__name__}.{module}") if module else experiment.PRESETS["paper"]
    for field in fields.split("."):
        found = found[field] if isinstance(found, Mapping) else getattr(found, field)
    return found


def table() -> list[list[str]]:
    """For people: section, what, what the paper prints, ours, and why it differs. The first line is the heading."""
    lines = [["section", "hyperparameter", "paper", "ours (preset paper)", "note"]]
    for row in (row for row in ROWS if row.experiment in experiments.NAMES):
        printed = "not printed" if row.printed is NOT_PRINTED else in_words(row.printed)
        lines.append([row.section, row.name, printed, in_words(value(row)), row.why])
    return lines


def in_words(value: object) -> str:
    """
    >>> in_words((128, 128, 1)), in_words(3e-4), in_words(50_000)
    ('[128, 128, 1]', '0.0003', '50000')
    """
    if isinstance(value, tuple | list):
        return f"[{', '.join(in_words(item) for item in value)}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


TRAINED: list[Entry] = [("optimiser", "Adam"), ("loss", "MSE"), ("non-linearity", "ReLU")]
NO_LOSS: list[Entry] = [("optimiser", "Adam"), ("loss", NOT_PRINTED, "", "MSE"), ("non-linearity", "ReLU")]
LAST_SIZE = ("8196 is printed, which doubling 2 does not reach",)

SCALING = rows(
    "Scaling experiment",
    "scaling",
    ("standard deviation of W and of x", 1.0),
    ("y", "x W"),
    ("pairs", 10, "pairs"),
    ("dimension of x", tuple(range(2, 11)), "dims"),
    ("first latent size", 2, "smallest"),
    ("next latent size", "s² (“double”)", "", "2 s", "the text says double"),
    ("last latent size, MLP", 8196, "mlp.largest", 8192, *LAST_SIZE),
    ("last latent size, Neural Process", 8196, "neural_process.largest", 8192, *LAST_SIZE),
    ("last latent size, Attention", 8196, "attention.largest", 8192, *LAST_SIZE),
    ("last latent size, Intention", 8196, "intention.largest", 512, "a flattened w makes a layer of s³ parameters"),
    ("maximum error", NOT_PRINTED, "threshold"),
    ("iterations", 100_000, "steps"),
    ("batch", 64, "batch"),
    ("learning rate", 3e-4, "learning_rate"),
    *TRAINED,
    ("Intention: layers of e_K and e_V", 2, "intention.embed"),
    ("Intention: layers of e_P", 2, "intention.decode"),
    ("Intention: E_Q", 0, "", "none: w is returned", "with E_Q = 0 the output would be 0"),
    ("Attention: layers of e_K, e_V and e_Q", 1, "attention.embed"),
    ("Attention: layers of e_P", 1, "attention.decode"),
    ("Attention: heads", 5, "attention.heads"),
    ("Attention: negative slope τ of the leaky ReLU", 0.01, "attention.slope"),
    ("Neural Process: layers of e_H", 2, "neural_process.embed"),
    ("Neural Process: layers of e_P", 4, "neural_process.decode"),
    ("MLP: layers of e_P", 4, "mlp.decode"),
    *UNPRINTED,
)

COMPARISON = rows(
    "Comparing the computations",
    "computations_2d",
    ("covariance of w", ((10, 0), (0, 10))),
    ("covariance of K", ((0.7, 0.9), (0.9, 1.0)), "task:PLANE", SAME, "repaired in two ways: it is not PSD"),
    ("Q inside: U(−r, r)", 1.0, "task:SQUARES.inside"),
    ("Q outside: U(−r, r)", 25.0, "task:SQUARES.outside"),
    ("Attention", "softmax(Q K') V"),
    ("Linear attention", "Q K' V"),
    ("σIntention", "softmax(Q (K'K)⁻¹ K') V"),
    ("Intention", "Q (K'K)⁻¹ K' V"),
    ("context points", NOT_PRINTED, "points"),
)

SINE = rows(
    "Sine regression",
    "sine",
    ("b", (0.0, PI), "task:PHASE"),
    ("a", (0.1, 5.0), "task:AMPLITUDE"),
    ("x", (-6.0, 6.0), "task:X"),
    ("y", "a sin(x − b)"),
    ("queries and targets M", 200, "queries"),
    ("keys and values N", 10, "points"),
    ("keys are among", "the queries"),
    ("iterations", 50_000, "steps"),
    ("batch", 8, "batch"),
    *TRAINED,
    *net("intention", 3e-4, embed=(1000, 1000, 1000, 1000)),
    ("Intention: e_K is shared by", "K, Q, V", "", "K, Q", "the output would have 1000 numbers for a target of one"),
    *net("attention", 1e-4, embed=(128, 128, 128), heads=5, decode=(128, 128, 1)),
    ("Attention: e_K is shared by", "K, Q"),
    *net("neural_process", 1e-4, embed=(2000, 2000, 16), decode=(2000, 2000, 2000, 1)),
    *net("maml", 3e-3, layers=(128, 128, 128, 128, 1), inner_steps=3),
    ("MAML: inner rate", 0.1, "maml.inner_rate", 0.01, "with 0.1 the loss spikes and stays that of predicting 0"),
    ("MAML: inner loss", "MSE"),
    *UNPRINTED,
)

POLICY = rows(
    "Policy distillation",
    "policy",
    ("standard deviation of the target", 1.0),
    ("observations", 5, "points"),
    ("variance of their places", 1 / 4, "task:SPREAD", 0.5, "as a standard deviation"),
    ("reward", "squared distance", "reward", ("squared", "gaussian"), "the Gaussian of section 5.3 is run beside it"),
    ("shape of O", (5, 2), "", (5, 3), "x, y and the reward are three numbers"),
    ("K, V, Q", "all are O"),
    ("evaluation tasks (section 5.3)", 1000, "evaluation_tasks"),
    *NO_LOSS,
    ("Intention, Attention: e_K", "[K, V, Q] as it is"),
    *net("intention", 3e-5, embed=(512, 512), decode=(128, 2)),
    *net("attention", 3e-5, embed=(128, 128), heads=5, decode=(2048, 2)),
    *net("neural_process", 3e-4, embed=(512, 512), decode=(512, 512, 128, 2)),
    *net("mlp", 3e-4, decode=(512, 512, 512, 2)),
    *UNPRINTED_LENGTH,
    *UNPRINTED,
)

KABSCH = rows(
    "Learning generalised Kabsch algorithm",
    "kabsch",
    ("dimensions", 2, "dims"),
    ("context points (section 5.4)", 5, "points"),
    *NO_LOSS,
    *net("intention", 3e-4, embed=(128, 128), decode=(128, 128, 2)),
    *net("attention", 3e-4, embed=(256, 256), heads=5, decode=(256, 256, 2)),
    *net("neural_process", 3e-4, embed=(256, 256), decode=(256, 256, 2)),
    *net("mlp", 3e-4, decode=(256, 256, 256, 10)),
    ("what e_K, e_V and e_Q read", "K, V, Q", "", "K or Q, V, K or Q", "M = N would be needed; e_K serves Q too"),
    ("standard deviation of the noise", NOT_PRINTED, "noise"),
    ("standard deviation of keys, queries and translation", NOT_PRINTED, "", 1.0),
    ("smallest scale", NOT_PRINTED, "smallest"),
    ("largest scale", NOT_PRINTED, "largest"),
    *UNPRINTED_LENGTH,
    *UNPRINTED,
)

NORMALISATION = rows(
    "Normalisation",
    "normalisation",
    ("points N", (16, 32, 64), "sizes"),
    ("standard deviation of keys and queries", 1.0),
    ("unscaled", "Q K' [K K']⁻¹"),
    ("scaled", "√d Q K' [K K']⁻¹"),
    ("with a regulariser", "0.5 √d Q K' [sig(α) K K' + (1 − sig(α)) I]⁻¹"),
    ("α at the start", 0),
    ("dimensions d", NOT_PRINTED, "dimensions"),
)

SLOWDOWN = rows(
    "section 3.1",
    "slowdown",
    ("repetitions", 1809, "repetitions"),
    ("smallest N and d", NOT_PRINTED, "smallest"),
    ("largest N and d", NOT_PRINTED, "largest"),
)

LAYERS = rows(
    "section 2",
    "layers",
    ("latent size", 1000, "dimension"),
    ("optimality gap to reach", 0.1, "goal"),
    ("condition numbers", (1.1, 10.0), "", SAME, "among others"),
)

ROWS: list[Row] = [
    *SCALING,
    *COMPARISON,
    *SINE,
    *images.PIXELS,
    *images.FEW_SHOT,
    *images.FEW_SHOT_RESNET,
    *images.KERNELS,
    *POLICY,
    *KABSCH,
    *images.ANOMALY,
    *NORMALISATION,
    *SLOWDOWN,
    *LAYERS,
]
