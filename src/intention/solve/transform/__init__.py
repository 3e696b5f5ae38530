"""Rows times Sigma^-1: the transform of queries, and sigma-Intention in one kernel."""
