"""Benchmarks of a server: sending of requests, metrics, sweeps."""
