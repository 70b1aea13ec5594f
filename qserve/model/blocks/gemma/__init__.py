"""Blocks that Gemma alone has."""
