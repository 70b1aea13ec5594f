"""Gated delta net: a recurrent layer with a state of fixed size instead of keys and values."""
