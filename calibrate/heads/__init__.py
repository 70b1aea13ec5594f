"""Draft heads in plain torch, for training and for calibration before quantization."""
