"""Lark grammars of tool calls, which enforce the schemas of the tools' arguments."""
