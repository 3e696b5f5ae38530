"""Kernels in C++, compiled when the package is installed; where they are missing, torch does the same work."""
