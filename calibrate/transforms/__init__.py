"""Transforms: rewrite float weights before they are rounded."""
