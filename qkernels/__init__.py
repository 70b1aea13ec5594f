"""Kernels and their references: the arithmetic of quantized models on a GPU or a CPU. Imports no triton by itself."""
