"""Measure and record the quality of a quantized model, by its distance from the float model."""
