"""quality.json of a quantized folder: its measured quality, and data for the start-up check."""
