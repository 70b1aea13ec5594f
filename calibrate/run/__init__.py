"""A run of `quantize_checkpoint`: what it decides before it begins, its layers, and its end."""
