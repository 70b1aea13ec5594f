"""Texts in Lark, the notation of grammars. The flags' parsers of tool calls need only this."""

import json


def quoted(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)
