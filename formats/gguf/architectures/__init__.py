"""Architectures of GGUF files: what each does differently from the family's checkpoint."""
