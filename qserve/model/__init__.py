"""The model: its layers, their weights, and how they are loaded from a checkpoint."""
