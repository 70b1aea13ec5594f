"""Rows of families whose layers have states: the mixers, and what the rows share."""
