"""Results of a quantization run: tensors, verification, report, model card."""
