"""LoRA terms of the rows of a batch, each with its own adapter."""
