"""What the bytes of a quantized checkpoint mean. Knows torch and safetensors; no model, no GPU."""
