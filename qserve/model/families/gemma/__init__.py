"""Gemma families. The first Gemma is not here: families/llama.py builds it."""
