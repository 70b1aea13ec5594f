"""Answers of megabytes: JSON as msgspec writes it whole, made and written in small pieces."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qserve.server.http import large_response
from qserve.server.http.errors import ApiError
from qserve.server.http.large_response import PIECE_BYTES, LargeResponse, json_pieces
from qserve.server.openai import pooling_replies
from qserve.server.requests import tokenize

SCALARS = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda each: st.lists(each, max_size=40) | st.dictionaries(st.text(), each, max_size=5),
    max_leaves=60,
)


@pytest.mark.exhaustive
@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_pieces_concatenate_to_whole_json(value):
    assert b"".join(json_pieces(value)) == msgspec.json.encode(value)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (5,), (300, 70), (2, 9000)])
def test_arrays_are_encoded_as_lists(shape):
    values = np.random.default_rng(0).standard_normal(shape).astype("<f4")
    found = json.loads(b"".join(json_pieces({"a": [values], 5: 1})))
    assert found == {"a": [values.tolist()], "5": 1}
    many = [{"data": values}] * 100  # a list that is encoded in slices
    assert json.loads(b"".join(json_pieces(many))) == [{"data": values.tolist()}] * 100


def test_no_call_encodes_more_than_a_few_pieces(monkeypatch):
    """One that encodes all holds the interpreter for as long."""
    sizes, encode = [], msgspec.json.encode

    def watched(value, **options):
        data = encode(value, **options)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(large_response.msgspec.json, "encode", watched)
    token = {"token": "x" * 30, "top_logprobs": [{"token": "y", "logprob": -0.5}] * 20}
    content = {"choices": [{"logprobs": {"content": [token] * 3000}} for _ in range(4)]}
    pieces = json_pieces(content | {"data": [np.zeros((1500, 64), "<f4")]})
    assert max(sizes) < 3 * PIECE_BYTES and max(map(len, pieces)) < 4 * PIECE_BYTES
    assert sum(map(len, pieces)) > 100 * PIECE_BYTES


def test_pieces_are_written_as_the_client_reads():
    sent = []

    async def send(message):
        sent.append(message)

    data = bytes(range(256)) * 1000
    asyncio.run(LargeResponse([data, b"end"], {"x-a": "b"})({"type": "http"}, None, send))
    head, *bodies = sent
    assert dict(head["headers"])[b"content-length"] == str(len(data) + 3).encode()
    assert dict(head["headers"])[b"content-type"] == b"application/json"
    assert b"".join(each["body"] for each in bodies) == data + b"end"
    assert max(len(each["body"]) for each in bodies) <= PIECE_BYTES
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]


def test_tokens_of_a_reply_are_bounded(server, error, monkeypatch):
    monkeypatch.setattr(tokenize, "MAX_TOKENS", 4)
    fine = server.post("/tokenize", {"prompt": "Once", "return_token_strs": True}).json()
    assert len(fine["token_strs"]) == fine["count"] <= 4
    refused = error(server.post("/tokenize", {"prompt": "Once upon a time there was"}), 400)
    assert "at most 4 tokens" in refused["message"] and refused["param"] == "prompt"
    refused = error(server.post("/detokenize", {"tokens": [5] * 5}), 400)
    assert "found 5" in refused["message"] and refused["param"] == "tokens"
    assert server.post("/detokenize", {"tokens": [5] * 4}).status_code == 200


def test_numbers_of_a_reply_are_bounded(monkeypatch):
    monkeypatch.setattr(pooling_replies, "MAX_NUMBERS", 3)
    outputs = [SimpleNamespace(pooled=b"\0" * 16)]
    for encoding in ("float", "base64"):
        job = SimpleNamespace(repeated={"encoding_format": encoding})
        if encoding == "base64":
            pooling_replies._check_size(job, outputs)
        else:
            with pytest.raises(ApiError, match="at most 3 numbers in one response, found 4"):
                pooling_replies._check_size(job, outputs)
