"""Which programs load a checkpoint: rules with their evidence."""
