"""Resolve Hugging Face hub names in the settings of commands and engines to local paths."""
