"""The fuzz over options: draw a call from a seed, and compare it with one formula in float64."""
