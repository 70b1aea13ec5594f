"""Names of published multimodal checkpoints, presented as transformers names its modules."""
