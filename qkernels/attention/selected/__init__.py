"""Attention over blocks of keys that an indexer selects (MiniMax-M3)."""
