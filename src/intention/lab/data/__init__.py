"""Data sets: named ones, the built-in one, and the user's own.

>>> from intention.lab import data
>>> built_in = data.load("built-in")
>>> built_in.parts["train"].x.shape[1:], built_in.by_class
(torch.Size([28, 28, 1]), True)
"""

from intention.lab.data.kinds import PARTS, Data, Labelled, split_classes
from intention.lab.data.named import BUILT_IN, NAMES, choose, folder, load, present

__all__ = [
    "BUILT_IN",
    "NAMES",
    "PARTS",
    "Data",
    "Labelled",
    "choose",
    "folder",
    "load",
    "present",
    "split_classes",
]
