"""Mamba-2: a recurrent layer with a state of fixed size in each head."""
