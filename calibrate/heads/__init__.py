"""Draft heads in plain torch: trained, and calibrated to be quantized. Knows no engine."""
