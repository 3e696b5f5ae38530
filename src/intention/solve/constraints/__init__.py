"""Least squares under linear constraints on w."""
