"""Causal convolutions over time, one per channel, and the state slots of recurrent layers."""
