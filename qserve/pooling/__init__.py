"""Embeddings, scores and labels: settings of a model, parameters, scoring."""
