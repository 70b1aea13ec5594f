"""Requests that benchmarks send: data sets, traces, send times."""
