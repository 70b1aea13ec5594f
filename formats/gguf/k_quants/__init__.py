"""K-quants: grids of quantized scales, the search for them, and their blocks."""
