"""From runs that are asked for to rows in a file: one after another, over processes, on a cluster."""

__all__: list[str] = []
