"""Models: layers, weights, and loading from a checkpoint."""
