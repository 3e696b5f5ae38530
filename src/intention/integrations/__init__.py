"""Intention inside other libraries: one module per library, each needs its own extra."""

__all__: list[str] = []
