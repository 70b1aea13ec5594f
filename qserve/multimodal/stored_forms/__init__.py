"""Conversions of models whose files have other keys and tensor names than transformers' model."""
