"""What is read ahead is what is read: each tensor once, errors where they belong."""

import threading

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from qserve.model.loading import read_ahead
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
    for name in reader.entries:  # also those that are read after it in the same task
        if name.startswith("model.layers.0.") and name != broken:
            assert torch.equal(ahead.get(name), get(name))
    ahead.close()


@pytest.mark.parametrize(("limit", "value"), [("TASK_TENSORS", 2), ("TASK_BYTES", 300_000)])
def test_tasks_have_limits(docs_5m, monkeypatch, limit, value):
    reader = CheckpointReader(docs_5m)
    names = [name for name in reader.entries if name.startswith("model.layers.0.")]
    sizes = {name: reader.entries[name].num_bytes for name in names}
    monkeypatch.setattr(read_ahead, limit, value)
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.0.")
    tasks = {id(task): list(task.names) for _, task in ahead._expected.values()}.values()
    assert sorted(name for task in tasks for name in task) == sorted(names)
    assert len(tasks) > 2
    for task in tasks:
        total = len(task) if limit == "TASK_TENSORS" else sum(sizes[name] for name in task)
        assert total <= value or len(task) == 1
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
