"""Compiled kernels for CPU tensors; everything here has an equal in plain torch, which runs where they are missing."""
