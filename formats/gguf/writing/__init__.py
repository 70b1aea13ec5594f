"""GGUF files written from checkpoints. Imported when a command writes one."""
