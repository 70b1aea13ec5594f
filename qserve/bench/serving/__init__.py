"""Benchmarks of a server: load, metrics, sweeps."""
