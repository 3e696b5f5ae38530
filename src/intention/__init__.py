"""Intention: least squares as a neural-network operation, beside attention."""

import intention.solve.compiled  # noqa: F401 - registers the operators that torch.compile calls
from intention import functional
from intention.solve.ladder import AccuracyWarning

__all__ = ["AccuracyWarning", "functional"]
__version__ = "0.1.0"
