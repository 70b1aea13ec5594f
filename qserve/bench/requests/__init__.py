"""The requests that benchmarks send: data sets, traces and send times."""
