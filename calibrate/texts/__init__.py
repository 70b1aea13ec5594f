"""Texts for calibration and evaluation."""
