"""Causal convolutions of each channel over time, and the state slots of layers that keep states."""
