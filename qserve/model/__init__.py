"""The model: layers, their weights and how a checkpoint becomes them. Knows no requests."""
