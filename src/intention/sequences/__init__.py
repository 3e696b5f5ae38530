"""Sequences: states that tokens are added to, and recurrent forms of the other mixers."""

__all__: list[str] = []
