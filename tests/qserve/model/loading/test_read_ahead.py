"""What is read ahead is what is read: each tensor once, errors where they belong."""

import threading

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from qserve.model.loading.read_ahead import ReadAhead

CPU = torch.device("cpu")


def test_a_layer_is_read_once_and_is_the_same(docs_5m, monkeypatch):
    reader = CheckpointReader(docs_5m)
    ahead, names = ReadAhead(reader, CPU), []
    get = reader.get
    monkeypatch.setattr(reader, "get", lambda name: (names.append(name), get(name))[1])
    layer = [name for name in reader.entries if name.startswith("model.layers.1.")]
    ahead.expect("model.layers.1.")
    ahead.expect("model.layers.1.")
    for name in layer:
        assert torch.equal(ahead.get(name), get(name))
    assert sorted(names) == sorted(layer)
    assert torch.equal(ahead.get(layer[0]), get(layer[0])), "a second time it is read again"
    other = next(name for name in reader.entries if name not in layer)
    assert torch.equal(ahead.get(other), get(other)), "also what nobody expected"
    ahead.close()
    assert torch.equal(ahead.get(other), get(other))


def test_an_error_shows_where_the_tensor_is_wanted(docs_5m, monkeypatch):
    reader = CheckpointReader(docs_5m)
    broken = next(name for name in reader.entries if name.startswith("model.layers.0."))
    get = reader.get

    def fails(name):
        if name == broken:
            raise CheckpointError(name, "ends too early")
        return get(name)

    monkeypatch.setattr(reader, "get", fails)
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.0.")
    with pytest.raises(CheckpointError, match="ends too early"):
        ahead.get(broken)
    ahead.close()


def test_closing_leaves_no_thread(docs_5m):
    reader, before = CheckpointReader(docs_5m), set(threading.enumerate())
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.0.")
    threads = set(threading.enumerate()) - before
    assert threads
    ahead.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
