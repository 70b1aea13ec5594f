"""GGUF files: read as model folders, and written. See formats/README.md."""
