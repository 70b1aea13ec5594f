"""Linears: the choice of a kernel by scheme and rows, and products of float weights."""
