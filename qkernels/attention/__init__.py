"""Paged attention, RoPE and the writing of keys and values."""
