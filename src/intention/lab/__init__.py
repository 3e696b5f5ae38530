"""The paper's experiments: `intention reproduce` runs them and writes one report. Needs the extra `intention[lab]`."""

from intention.lab.core import results, train

__all__ = ["results", "train"]
