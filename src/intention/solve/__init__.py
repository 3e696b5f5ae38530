"""The one place that factors a matrix."""
