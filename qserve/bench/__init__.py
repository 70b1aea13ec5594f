"""Benchmarks, profiles and simulation: a file a noun. What drives servers loads no torch."""
