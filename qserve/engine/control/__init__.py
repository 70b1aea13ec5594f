"""Operators' commands to an engine: pause, sleep, wake, new weights."""
