"""Families with latent or compressed attention."""
