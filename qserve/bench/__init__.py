"""Benchmarks, profiles and simulation. The modules that send requests to servers load no torch."""
