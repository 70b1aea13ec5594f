"""Files of a model folder besides the tensors: locks, atomic writes, side files, data rows."""
