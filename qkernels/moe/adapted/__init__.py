"""LoRA adapters of routed experts."""
