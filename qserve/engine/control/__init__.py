"""Operator commands to an engine: pause, sleep, wake up, update weights."""
