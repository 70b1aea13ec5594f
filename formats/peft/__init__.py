"""LoRA adapters in PEFT's folder layout."""
