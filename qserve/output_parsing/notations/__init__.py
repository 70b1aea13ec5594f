"""Notations of tool calls, each a reader of characters."""
