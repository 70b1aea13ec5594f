"""Paged attention that adds in the same order in any batch (`--batch-invariant`)."""
