"""LoRA adapters of a served model: requests, host and device memory, slots."""
