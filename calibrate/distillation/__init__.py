"""Distillation: train a quantized model's scales and norm weights to predict as the float model."""
