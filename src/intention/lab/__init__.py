"""The paper's experiments: `intention reproduce` runs them and writes one report. Needs the extra `intention[lab]`."""
