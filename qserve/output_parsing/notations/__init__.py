"""Streaming readers of tool calls, one per notation."""
