"""Building blocks of decoders, one per file; they hold weights, and know no checkpoint."""
