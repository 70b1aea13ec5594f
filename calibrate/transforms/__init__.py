"""Transforms: rewrite float weights so that rounding them changes the model less."""
