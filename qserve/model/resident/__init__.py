"""Weights of a loaded model: enumerate all tensors, replace their contents, free their memory."""
