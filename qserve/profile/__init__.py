"""Profiles: where the time of steps goes, from a trace. Only the recorder needs torch."""
