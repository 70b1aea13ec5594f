"""Profiles of steps: recording and analysis of traces."""
