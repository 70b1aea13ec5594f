"""Paged attention over KV pages of 4 bits."""
