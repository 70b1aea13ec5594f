"""GGUF files: reading them as model folders, and writing them. See formats/README.md."""
