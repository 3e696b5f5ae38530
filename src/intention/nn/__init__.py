"""Modules: thin shells that hold parameters around `functional` and `fit`."""

from intention.nn.heads import Intention

__all__ = ["Intention"]
