"""Models without a family in formats, run by transformers' modules over the engine's KV cache."""
