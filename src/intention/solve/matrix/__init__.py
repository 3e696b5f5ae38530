"""A given matrix: its inverse, its inverse root."""
