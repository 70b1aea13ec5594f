"""Profiling of engine steps: recording and analysis of traces."""
