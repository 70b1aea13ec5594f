"""Cost of a chunk of a stream in the event loop, in Python calls."""

from pathlib import Path

import pytest

import qserve
from tests.qserve.engine.test_step_cost import Calls

FEW, MANY, NUM_CHOICES = 40, 70, 4
# and the most calls of a chunk
FIELDS = [({}, 48), ({"logprobs": 3}, 80), ({"return_token_ids": True}, 48)]
OURS = str(Path(qserve.__file__).parent)


class PackageCalls(Calls):
    """Count calls in this package only: those of the event loop differ by Python version."""

    def watch(self, frame, event, argument):
        if frame.f_code.co_filename.startswith(OURS):
            super().watch(frame, event, argument)


def calls_of(server, **fields):
    """Calls by name for each chunk, beyond those of a stream of FEW tokens for each choice."""
    server.client.endless = True
    server.complete(stream=True, n=NUM_CHOICES, max_tokens=FEW, **fields)
    found = []
    for count in (FEW, MANY):
        with PackageCalls() as calls:
            reply = server.complete(stream=True, n=NUM_CHOICES, max_tokens=count, **fields)
        assert reply.text.count("data: ") == NUM_CHOICES * count + 1
        found.append(calls.names)
    few, many = found
    return {name: (n - few[name]) / (NUM_CHOICES * (MANY - FEW)) for name, n in many.items()}


# In a stream of 48 choices, on one core of a server CPU of 2024, a chunk takes 24 us, and 42 us
# with 20 alternatives. The envelope's part of its JSON is 0.3 us: not worth bytes made in advance.
@pytest.mark.parametrize(("fields", "most"), FIELDS)
def test_stream_chunk_reuses_constant_parts(server, fields, most):
    calls = calls_of(server, **fields)
    assert sum(calls.values()) <= most, sorted(calls.items(), key=lambda item: -item[1])[:20]
    for name, count in calls.items():
        # Parameters are checked when they are made.
        assert not (name.startswith("SamplingParams.") and count), name
    # The text of an alternative is known once asked for; a detokenizer decodes twice a token.
    assert calls["Tokenizer.decode"] <= (4.2 if "logprobs" in fields else 2.1)
    assert "logprobs" not in fields or calls["Tokenizer.token_text"] == 3
