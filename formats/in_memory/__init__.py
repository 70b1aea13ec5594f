"""Weights in memory: integer codes, 4- and 8-bit floats, and their slices and shards."""
