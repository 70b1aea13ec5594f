"""LoRA adapters of a served model: requests, host memory, device memory and slots."""
