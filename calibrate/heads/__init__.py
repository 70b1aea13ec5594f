"""Draft heads as plain torch modules, for training and for calibration before quantization."""
