"""Families of Gemma after the first, which is built as Llama."""
