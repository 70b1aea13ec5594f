"""Batch-invariant latent attention."""
