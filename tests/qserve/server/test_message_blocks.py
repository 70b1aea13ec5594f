"""Content blocks made of pieces: white space, reasoning, broken calls, calls without arguments."""

import pytest

from qserve.output_parsing.output_parser import ParseSettings
from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, REASONING, Piece
from qserve.server.anthropic.blocks import ContentBlocks
from tests.qserve.server.messages_api import message_of

USAGE = {"usage": {}}


def blocks_of(pieces):
    """The blocks, and what a client makes of their events."""
    blocks = ContentBlocks(parsing=ParseSettings(tool_parser="hermes"))
    events = [event for piece in pieces for event in blocks.take(piece)] + [*blocks.end()]
    start = {"type": "message_start", "message": {"content": [], "stop_reason": None} | USAGE}
    ending = [{"type": "message_delta", "delta": {}} | USAGE, {"type": "message_stop"}]
    return blocks.done, message_of([start, *events, *ending])["content"], blocks.num_calls


def call(arguments, index=0):
    return [Piece(NAME, "f", index), *(Piece(ARGUMENTS, each, index) for each in arguments)]


def shown(blocks):
    """Blocks without ids and signatures."""
    values = {"text": "text", "thinking": "thinking", "tool_use": "input"}
    return [block[values[block["type"]]] for block in blocks]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([*call(['{"a"', ": 1}"]), Piece(CONTENT, "\n"), *call(["{}"], 1)], [{"a": 1}, {}]),
        (
            [Piece(CONTENT, "\n"), Piece(CONTENT, " Hm"), *call(["{}"]), Piece(CONTENT, " ")],
            ["\n Hm", {}],
        ),
        (
            [Piece(REASONING, "so"), Piece(CONTENT, "\n\n"), Piece(CONTENT, "Yes")],
            ["so", "\n\nYes"],
        ),
        ([*call(["{}"]), Piece(CONTENT, "then"), *call(["{}"], 1)], [{}, "then", {}]),
        ([Piece(REASONING, "so"), *call([])], ["so", {}]),
        ([Piece(REASONING, "so"), Piece(CONTENT, " \n")], ["so", ""]),
        ([], [""]),
    ],
)
def test_streamed_blocks_equal_whole(pieces, expected):
    done, streamed, num_calls = blocks_of(pieces)
    assert shown(done) == shown(streamed) == expected and done == streamed
    assert num_calls == sum(isinstance(each, dict) for each in expected)


@pytest.mark.parametrize(
    ("revokes", "expected"), [(True, ["Hm ", "<tool_call>{?"]), (False, ["Hm ", {}])]
)
def test_broken_call_becomes_text_if_not_yet_sent(revokes, expected):
    pieces = [Piece(CONTENT, "Hm "), *call(['{"a": ']), Piece(BROKEN, "<tool_call>{?")]
    blocks = ContentBlocks(parsing=ParseSettings(tool_parser="hermes"), revokes=revokes)
    events = [event for piece in pieces for event in blocks.take(piece)] + [*blocks.end()]
    assert shown(blocks.done) == expected and blocks.num_calls == 0  # stop_reason: end_turn
    if not revokes:
        stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
        assert stops == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1, "b": "x', {"a": 1}), ('{"a": [1, {"c', {"a": [1, {}]}), ("", {}), ("[1", {})],
)
def test_truncated_arguments(arguments, expected):
    blocks = ContentBlocks(parsing=ParseSettings(tool_parser="hermes"))
    for piece in call([arguments] if arguments else []):
        for _ in blocks.take(piece):
            pass
    assert [*blocks.end()] and shown(blocks.done) == [expected]
