"""Converts a system prompt and turns of content blocks to chat messages."""

from collections.abc import Sequence
from typing import Any

from qserve.server.requests.anthropic.blocks import (
    ASSISTANT,
    IMAGE,
    SYSTEM,
    TEXT,
    TOOL_USE,
    TextBlock,
    ToolResult,
    ToolUse,
    joined,
)

# Start of Claude Code's first system block, which is for billing. The block differs between
# conversations, so it is dropped: otherwise no two conversations would share a cached prefix.
BILLING = "x-anthropic-billing-header:"

Turn = tuple[str, list[Any]]  # role and blocks


def chat_messages(
    system: Sequence[TextBlock], turns: Sequence[Turn], *, keeps_later_system: bool
) -> list[dict[str, Any]]:
    """Return the chat messages. Adjacent turns of one role become one message.

    `keeps_later_system`: True keeps the position of system turns after the first user turn; False
    appends them to the system prompt.
    """
    first = [block.text for block in system if not block.text.startswith(BILLING)]
    kept: list[Turn] = []
    for role, blocks in turns:
        if role == SYSTEM and not (kept and keeps_later_system):
            first += [block.text for block in blocks]
        elif kept and kept[-1][0] == role:
            kept[-1] = (role, [*kept[-1][1], *blocks])
        else:
            kept.append((role, list(blocks)))
    prompt = joined(*first)
    messages: list[dict[str, Any]] = [{"role": SYSTEM, "content": prompt}] if prompt else []
    names: dict[str, str] = {}  # call id -> tool name
    for role, blocks in kept:
        if role == ASSISTANT:
            names |= {block.id: block.name for block in blocks if isinstance(block, ToolUse)}
            messages.append(_assistant(blocks))
        else:
            messages += _results(blocks, names)
            messages += _said(role, blocks)
    return messages


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": block.input},
        }
        for block in blocks
        if block.type == TOOL_USE
    ]
    message: dict[str, Any] = {"role": ASSISTANT, "content": _text(blocks, (TEXT,))}
    thoughts = joined(*(block.thinking for block in blocks if block.type == "thinking"))
    if thoughts:
        message["reasoning_content"] = thoughts
    return message | ({"tool_calls": calls} if calls else {})


def _results(blocks: list[Any], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return the messages with tool outputs. Templates expect them directly after the calls."""
    return [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": block.text,
            **({"name": names[block.tool_use_id]} if block.tool_use_id in names else {}),
        }
        for block in blocks
        if isinstance(block, ToolResult)
    ]


def _said(role: str, blocks: list[Any]) -> list[dict[str, Any]]:
    """Return a list of one message with the rest of a turn; [] if the turn has only text outputs.

    The message includes images of tool outputs, since templates expect tool outputs to be text.
    """
    rest = [
        each
        for block in blocks
        for each in (block.images if isinstance(block, ToolResult) else [block])
    ]
    if blocks and not rest:
        return []
    if not any(block.type == IMAGE for block in rest):
        return [{"role": role, "content": _text(rest, (TEXT, "document", "search_result"))}]
    parts = [
        {"type": "image_url", "image_url": block.url}
        if block.type == IMAGE
        else {"type": "text", "text": block.text}
        for block in rest
    ]
    return [{"role": role, "content": parts}]


def _text(blocks: list[Any], kinds: tuple[str, ...]) -> str:
    return joined(*(block.text for block in blocks if block.type in kinds))
