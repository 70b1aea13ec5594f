"""Mamba-2: a layer whose past is a state of one size in each head, read and written by a scan."""
