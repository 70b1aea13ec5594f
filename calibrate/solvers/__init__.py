"""Solvers: from a weight and its statistics to codes."""
