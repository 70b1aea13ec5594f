"""GrammarQueue: when a grammar is cancelled, and which requests an error ends."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from formats.errors import InputError
from qserve.engine.pending import pending as module
from qserve.engine.pending.pending import GrammarQueue


class Compiler:
    """One future for each grammar; notes what is cancelled."""

    def __init__(self, *arguments):
        self.futures, self.clients, self.cancelled = {}, [], []

    def submit(self, grammar, client):
        self.clients.append(client)
        return self.futures.setdefault(grammar, Future())

    def cancel(self, grammar):
        self.cancelled.append(grammar)

    def constraint(self, compiled, client):
        if compiled == "large":
            raise InputError("structured_outputs", "takes all memory")
        return f"{compiled} of {client}"


class FakeRequest:
    def __init__(self, grammar, client=""):
        self.params, self.client = SimpleNamespace(structured_outputs=grammar), client
        self.constraint = None


@pytest.fixture
def waiting(monkeypatch):
    monkeypatch.setattr(module, "GrammarCompiler", Compiler)
    return GrammarQueue("", SimpleNamespace(vocab_size=8, eos_token_ids=()))


def test_grammar_is_cancelled_with_its_last_pending_request(waiting):
    first, second, other = FakeRequest("a", "one"), FakeRequest("a", "two"), FakeRequest("b")
    for request in (first, second, other):
        waiting.add(request)
    assert waiting._compiler.clients == ["one", "two", ""]
    assert waiting.remove(first) and waiting._compiler.cancelled == []
    assert waiting.remove(second) and waiting._compiler.cancelled == ["a"]
    assert not waiting.remove(second) and waiting.num_waiting == 1


@pytest.mark.parametrize("error", [OverflowError("too large"), InputError("x", "too large")])
def test_grammar_error_fails_only_its_requests(waiting, error):
    requests = {name: FakeRequest(name, "one") for name in ("bad", "large", "good", "slow")}
    for request in requests.values():
        waiting.add(request)
    futures = waiting._compiler.futures
    futures["bad"].set_exception(error)
    futures["large"].set_result("large")
    futures["good"].set_result("good")
    found = dict(waiting.take_compiled(wait_a_little=True))
    assert "too large" in str(found[requests["bad"]])
    assert "takes all memory" in str(found[requests["large"]])
    assert found[requests["good"]] is None and requests["good"].constraint == "good of one"
    assert waiting.num_waiting == 1
