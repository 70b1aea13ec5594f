"""Routing of a prompt: to the server with its longest prefix, unless this server is much busier."""

import random

import pytest

from qserve.deploy.routed_request import RoutedRequest, look_into
from qserve.engine.ipc.prefix_table import BLOCK, MAX_BLOCKS, PrefixTable

IDLE = {"a": 0, "b": 0, "c": 0}


def text(seed, blocks=4):
    return random.Random(seed).randbytes(blocks * BLOCK)


def test_prompt_is_routed_to_server_with_its_prefix():
    table = PrefixTable()
    first = table.choose(text(1), IDLE)[0]
    for number in range(5):
        assert table.choose(text(1) + text(100 + number, 1), IDLE)[0] == first


def test_new_prompts_spread_over_servers_with_equal_loads():
    table = PrefixTable()
    chosen = [table.choose(text(seed), IDLE)[0] for seed in range(9)]
    assert sorted(map(chosen.count, "abc")) == [3, 3, 3]


def test_longest_match_wins_and_all_servers_are_ranked():
    table = PrefixTable()
    table.note(text(1, 2), "a")
    table.note(text(1, 2) + text(2, 3), "b")
    assert table.choose(text(1, 2) + text(2, 3), IDLE) == ["b", "a", "c"]


def test_different_block_ends_match():
    """Equal text after a different block is not the same prefix."""
    table = PrefixTable()
    table.note(text(1), "a")
    table.note(text(2), "b")
    mixed = text(2, 4)[:BLOCK] + text(1)[BLOCK:]
    assert table.choose(mixed, IDLE)[0] == "b"


@pytest.mark.parametrize(
    ("loads", "first"),
    [
        ({"a": 32, "b": 0}, "a"),  # not so much more
        ({"a": 33, "b": 0}, "b"),
        ({"a": 133, "b": 100}, "a"),  # more, but not by half
        ({"a": 151, "b": 100}, "b"),
    ],
)
def test_busy_server_is_skipped(loads, first):
    table = PrefixTable()
    table.note(text(1), "a")
    assert table.choose(text(1), loads)[0] == first


def test_short_prompts_match_as_a_whole():
    table = PrefixTable()
    table.note(b"hello", "b")
    assert table.choose(b"hello", IDLE)[0] == "b"
    assert table.choose(b"hello you", {"a": 0, "b": 1})[0] == "a"


def test_memory_is_bounded_and_short_prefixes_are_kept():
    table = PrefixTable(kept_blocks=10)
    for seed in range(50):
        table.note(text(seed), "a")
    assert len(table._blocks["a"]) == 10
    assert table._num_matched("a", table._keys(text(49))) == 4
    assert table._num_matched("a", table._keys(text(47))) == 2, "its end went first"
    table.note(text(1, 2 * MAX_BLOCKS), "b")
    assert len(table._keys(text(1, 2 * MAX_BLOCKS))) == MAX_BLOCKS


def test_removed_servers_are_forgotten():
    table = PrefixTable()
    table.note(text(1), "a")
    table.keep(["b"])
    table.keep(["a", "b"])
    assert table.choose(text(1), {"a": 1, "b": 0})[0] == "b"
    assert table.choose(text(1), {}) == []


def test_prefix_routing_hits_more_than_round_robin():
    """Blocks that a request finds at its server, of all its blocks; 4 servers, 16 beginnings."""
    rng = random.Random(5)
    trace = [text(beginning) + rng.randbytes(BLOCK) for beginning in range(16)] * 10
    rng.shuffle(trace)

    def rate(choose):
        table, found, total = PrefixTable(), 0, 0
        for number, prompt in enumerate(trace):
            server = choose(table, number, prompt)
            keys = table._keys(prompt)
            found += table._num_matched(server, keys)
            total += len(keys)
            table.note(prompt, server)
        return found / total

    loads = dict.fromkeys("abcd", 0)
    by_turns = rate(lambda table, number, prompt: "abcd"[number % 4])

    def by_prefix(table, number, prompt):
        # `choose` notes its choice: asked of a copy, so that `rate` sees what was there before.
        copy = PrefixTable()
        copy._blocks = {name: blocks.copy() for name, blocks in table._blocks.items()}
        return copy.choose(prompt, loads)[0]

    assert rate(by_prefix) > 0.85 and by_turns < 0.65


BODIES = {
    "a prompt": (b'{"model": "m", "prompt": "text"}', "m", b'"m"\n"text"'),
    "no model": (b'{"prompt": [1, 2]}', None, b"[1, 2"),
    "a chat": (
        b'{"stream": true, "messages": [{"role": "user", "content": "hi"}], "model": "m"}',
        "m",
        b'"m"\n[{"role": "user", "content": "hi"',
    ),
    "an odd model": (b'{"model": 3, "prompt": "text"}', None, b'3\n"text"'),
    "no JSON": (b'{"model', None, b""),
    "no object": (b"[1]", None, b""),
    "nothing": (b"", None, b""),
    "no UTF-8": (b'{"model": "\xff"}', None, b""),
}


@pytest.mark.parametrize("case", BODIES)
def test_router_prefix_key_of_a_body(case):
    body, model, seen = BODIES[case]
    assert look_into(body) == (model, seen)


def test_next_chat_turn_shares_prefix():
    first = b'{"messages": [{"role": "user", "content": "one"}]}'
    second = first[:-2] + b', {"role": "assistant", "content": "two"}]}'
    assert look_into(second)[1].startswith(look_into(first)[1])


def test_other_fields_do_not_change_routing():
    bodies = [
        b'{"prompt": "text", "temperature": 1, "user": "x"}',
        b'{"user": "y", "prompt": "text"}',
    ]
    assert len({look_into(body)[1] for body in bodies}) == 1
    salted = b'{"prompt": "text", "cache_salt": "x"}'
    assert look_into(salted)[1] != look_into(bodies[0])[1]


def test_proxied_request_keeps_end_to_end_headers():
    scope = {
        "method": "POST",
        "path": "/llm/v1/completions",
        "root_path": "/llm",
        "query_string": b"a=1",
        "headers": [
            (b"authorization", b"Bearer key"),
            (b"transfer-encoding", b"chunked"),
            (b"x-request-id", b"7"),
        ],
        "client": ["10.0.0.1", 4],
    }
    made = RoutedRequest.of_scope(scope, b"body", b"").scope()
    assert made["path"] == "/v1/completions" and made["query_string"] == b"a=1"
    assert made["headers"] == [
        (b"authorization", b"Bearer key"),
        (b"x-request-id", b"7"),
        (b"content-length", b"4"),
    ]
