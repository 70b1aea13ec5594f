"""quality.json of a quantized folder: its measured quality, and what a start-up check compares."""
