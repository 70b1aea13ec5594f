"""Latent attention (MLA), and adapters of the matrix that it multiplies into queries."""
