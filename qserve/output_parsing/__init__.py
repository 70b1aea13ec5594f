"""Parsers of model output: reasoning, content and tool calls."""
