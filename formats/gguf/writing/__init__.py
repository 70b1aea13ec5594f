"""Writing of GGUF files from checkpoints; imported only by commands that write one."""
