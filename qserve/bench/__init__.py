"""Benchmarks, profiles and simulation. Modules that drive servers import no torch."""
