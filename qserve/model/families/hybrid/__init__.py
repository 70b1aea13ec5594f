"""Families whose layers have states besides pages, a module each."""
