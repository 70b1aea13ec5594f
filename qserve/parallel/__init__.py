"""Tensor and pipeline parallelism: the ranks of a model and their communication."""
