"""Intention: least squares as a neural-network operation, beside attention."""

import intention.solve.compiled  # noqa: F401 - registers the operators that torch.compile calls
from intention import constraints, discriminant, features, functional, kernels, nn
from intention.context import Context
from intention.fitting import fit
from intention.solve.ladder import AccuracyWarning
from intention.solve.native.library import info as native_info
from intention.streaming import CausalState, causal_intention

__all__ = [
    "AccuracyWarning",
    "CausalState",
    "Context",
    "causal_intention",
    "constraints",
    "discriminant",
    "features",
    "fit",
    "functional",
    "kernels",
    "native_info",
    "nn",
]
__version__ = "0.1.0"
