"""Rows of families.py by kind of model, and values that several rows share."""
