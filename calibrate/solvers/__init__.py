"""Solvers: compute codes from a weight and its input statistics."""
