"""Blocks that only Gemma models have."""
