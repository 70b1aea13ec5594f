"""Rounding between floats and codes, and dense packing of codes into words."""
