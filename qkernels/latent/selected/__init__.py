"""Latent attention over keys that an indexer selects (DeepSeek Sparse Attention)."""
