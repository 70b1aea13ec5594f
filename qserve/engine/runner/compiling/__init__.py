"""Kernels that are compiled before their first launch."""
