"""Building blocks of decoders, one per file. They hold weights but do not read checkpoints."""
