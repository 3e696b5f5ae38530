"""Intention: least squares as a neural-network operation, beside attention."""

from intention import functional
from intention.solve import compiled as _compiled  # registers the operators that torch.compile calls
from intention.solve.ladder import AccuracyWarning

__all__ = ["AccuracyWarning", "functional"]
__version__ = "0.1.0"
