"""Intention: least squares as a neural-network operation, beside attention."""

from intention import constraints, discriminant, features, functional, kernels, nn
from intention.context import Context
from intention.context.fit import fit
from intention.sequences.state import CausalState, causal_intention
from intention.solve.ladder import AccuracyWarning
from intention.solve.native.library import info as native_info

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
__version__ = "0.2.0"
