"""Results of a run: tensors, verification, report, model card."""
