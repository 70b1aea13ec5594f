"""Distillation: train a quantized model's scales and norms to match the float model's logits."""
