"""What a row of the table of hyperparameters is, and lines that several experiments share."""

from __future__ import annotations

from typing import Any, NamedTuple

from intention.lab.experiments.base import label

__all__ = ["NOT_PRINTED", "SAME", "UNPRINTED", "UNPRINTED_LENGTH", "Entry", "Row", "net", "rows"]

SAME = "as printed"
NOT_PRINTED = None


class Row(NamedTuple):
    """One hyperparameter.

    `path` leads to our value: a field of the experiment's paper Config ("attention.heads") or a constant of a file of
    its folder ("task:AMPLITUDE"). Empty: it is in the code of the models or samplers. `printed` is None where the paper
    needs a value and gives none; `ours` then says ours if `path` does not.
    """

    section: str
    experiment: str
    name: str
    printed: object
    path: str = ""
    ours: object = SAME
    why: str = ""

    @property
    def expected(self) -> object:
        return self.printed if self.ours is SAME else self.ours


Entry = tuple[Any, ...]  # name, printed, path, ours, why: the last three may be left out


def rows(section: str, experiment: str, *entries: Entry) -> list[Row]:
    return [Row(section, experiment, *entry) for entry in entries]


WORDS = {"embed": "layers of the embedding", "decode": "layers of e_P", "layers": "layers of e_P"}


def net(model: str, learning_rate: float, **sizes: tuple[int, ...] | int) -> list[Entry]:
    """The lines of one model. The embedding is e_H of a Neural Process, e_K and e_V of the others."""
    fields = {**sizes, "learning_rate": learning_rate}
    return [(f"{label(model)}: {_words(field)}", printed, f"{model}.{field}") for field, printed in fields.items()]


def _words(field: str) -> str:
    return WORDS.get(field, field.replace("_", " "))


UNPRINTED: list[Entry] = [
    ("α at the start", NOT_PRINTED, "alpha"),
    ("schedule of the learning rate", NOT_PRINTED, "schedule"),
    ("largest norm of a gradient", NOT_PRINTED, "clip"),
]
UNPRINTED_LENGTH: list[Entry] = [("iterations", NOT_PRINTED, "steps"), ("batch", NOT_PRINTED, "batch")]
