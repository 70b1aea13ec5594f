"""Measurements of single steps: their times, the least possible times, and profiles."""
