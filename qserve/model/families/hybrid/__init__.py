"""Families with recurrent states in some or all layers, one module each."""
