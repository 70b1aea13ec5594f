"""K-quants: grids of quantized scales, their search, and blocks."""
