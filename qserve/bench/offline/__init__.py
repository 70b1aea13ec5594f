"""Benchmarks without a server: latency, throughput, startup."""
