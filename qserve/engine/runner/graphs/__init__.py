"""CUDA graphs of steps: their keys, inputs and capture."""
