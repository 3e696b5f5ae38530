"""Sequences: the fit of token t sees tokens <= t."""
