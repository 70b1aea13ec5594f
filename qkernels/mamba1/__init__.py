"""Mamba-1: a recurrent layer with a state of fixed size in each channel."""
