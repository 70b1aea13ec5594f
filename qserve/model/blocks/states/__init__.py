"""Blocks of mixers with a state of fixed size."""
