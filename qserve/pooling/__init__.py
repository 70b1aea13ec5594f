"""Pooling: embeddings, scores and labels; a model's settings, request parameters, scoring."""
