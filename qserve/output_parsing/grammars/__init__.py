"""Lark grammars of tool calls, for calls that must fit their schemas."""
