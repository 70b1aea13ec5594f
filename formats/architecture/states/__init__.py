"""Rows of families with recurrent layers: the mixers, and what the rows share."""
