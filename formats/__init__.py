"""What the bytes of a quantized checkpoint mean. Knows torch, numpy, safetensors and json; no GPU code, no model code."""
