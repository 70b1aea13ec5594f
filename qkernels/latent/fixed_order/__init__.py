"""Latent attention in one order of summation."""
