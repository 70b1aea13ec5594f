"""Quality of a quantized model: its distance from the float model, and the records of it."""
