"""Measurements of single steps, their least times, and profiles."""
