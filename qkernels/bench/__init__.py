"""Kernel benchmarks: `qserve bench kernels`. A server never imports this package."""
