"""In-memory forms of weights: integer codes, 4- and 8-bit floats; their slices and shards."""
