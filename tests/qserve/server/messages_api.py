"""Requests to /v1/messages, and the events of streams as Anthropic's clients read them."""

import json

BASE = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
OBJECT = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Look outside.", "input_schema": OBJECT}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def ask(server, path="/v1/messages", headers=None, **fields):
    return server.post(path, BASE | fields, headers=headers)


def message(reply):
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(reply, status, kind):
    """The message of an error, checked for Anthropic's form."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["type"] == kind
    assert reply.headers["request-id"] == body["request_id"]
    assert len(reply.content) < 4096
    return body["error"]["message"]


def events_of(reply):
    """The events of a stream; each has its type as name."""
    assert reply.status_code == 200, reply.text
    *blocks, rest = reply.text.split("\n\n")
    assert rest == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(events):
    """The message of a stream, checked for the order of its events."""
    events = [event for event in events if event["type"] != "ping"]
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        *("message_start", "message_delta", "message_stop"),
    )
    found, is_open, pieces = first["message"], False, []
    assert found["content"] == [] and found["stop_reason"] is None
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(found["content"])
            is_open, pieces = True, []
            found["content"].append(event["content_block"])
            continue
        assert is_open and event["index"] == len(found["content"]) - 1
        block = found["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads("".join(pieces))
            continue
        kind, value = event["delta"].values()
        if kind == "input_json_delta":
            assert block["type"] == "tool_use"
            pieces.append(value)
        elif kind == "signature_delta":
            block["signature"] = value
        else:
            name = kind.removesuffix("_delta")
            assert name == block["type"]
            block[name] += value
    assert not is_open
    return found | delta["delta"] | {"usage": first["message"]["usage"] | delta["usage"]}
