"""Reading ahead: each tensor is read once, and its error is raised when it is requested."""

import threading
from types import SimpleNamespace

import pytest
import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.files.tensor_entry import TensorEntry
from qserve.model.loading import read_ahead
from qserve.model.loading.read_ahead import ReadAhead

CPU = torch.device("cpu")


@pytest.fixture
def reads(monkeypatch):
    """(first byte, end) of each read of a file."""
    found, read_bytes = [], TensorEntry.read_bytes

    def note(self, start, stop):
        found.append((self.offset + start, self.offset + stop))
        return read_bytes(self, start, stop)

    monkeypatch.setattr(TensorEntry, "read_bytes", note)
    return found


def test_layer_is_read_once_and_equal(docs_5m, reads):
    reader = CheckpointReader(docs_5m)
    layer = [name for name in reader.entries if name.startswith("model.layers.1.")]
    other = next(name for name in reader.entries if name not in layer)
    wanted = {name: reader.get(name) for name in [*layer, other]}
    reads.clear()
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.1.")
    ahead.expect("model.layers.1.")
    for name in layer:
        assert torch.equal(ahead.get(name), wanted[name])
    covered = sum(reader.entries[name].num_bytes for name in layer)
    assert sum(stop - start for start, stop in reads) == covered, "each byte is read once"
    assert torch.equal(ahead.get(layer[0]), wanted[layer[0]]), "a second time it is read again"
    assert torch.equal(ahead.get(other), wanted[other]), "also what nobody expected"
    ahead.close()
    assert torch.equal(ahead.get(other), wanted[other])


def test_small_tensors_are_read_together(docs_5m, reads):
    """A tensor that the caller keeps does not keep the memory of its neighbours."""
    reader = CheckpointReader(docs_5m)
    layer = [name for name in reader.entries if name.startswith("model.layers.1.")]
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.1.")
    kept = ahead.get(layer[0])
    assert kept.untyped_storage().nbytes() == reader.entries[layer[0]].num_bytes
    shared = ahead.get(layer[1], shared=True)
    assert shared.untyped_storage().nbytes() > reader.entries[layer[1]].num_bytes
    for name in layer[2:]:
        ahead.get(name)
    ahead.close()
    assert len(reads) < len(layer) / 2


def test_tensors_at_odd_offsets_are_read_together(tmp_path):
    """int8 tensors of odd sizes shift the following ones."""
    tensors = {
        "layer.a": torch.arange(3, dtype=torch.int8),
        "layer.b": torch.arange(5, dtype=torch.float32),
        "layer.c": torch.zeros(0, 4),
        "layer.d": torch.arange(6, dtype=torch.float16).reshape(2, 3),
    }
    data = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    entries, offset = {}, 0
    (tmp_path / "data").write_bytes(data)
    for name, tensor in tensors.items():
        entries[name] = TensorEntry(
            name=name,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            num_bytes=tensor.nbytes,
            file=tmp_path / "data",
            offset=offset,
        )
        offset += tensor.nbytes
    ahead = ReadAhead(SimpleNamespace(entries=entries), CPU)
    ahead.expect("layer.")
    for name, tensor in tensors.items():
        found = ahead.get(name)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    ahead.close()


def test_read_error_is_raised_at_use(docs_5m, monkeypatch):
    reader = CheckpointReader(docs_5m)
    layer = [name for name in reader.entries if name.startswith("model.layers.0.")]
    wanted = {name: reader.get(name) for name in layer}
    broken, read_bytes = reader.entries[layer[1]], TensorEntry.read_bytes

    def fails(self, start, stop):
        if self.offset + start <= broken.offset < self.offset + stop:
            raise CheckpointError(self.name, "ends too early")
        return read_bytes(self, start, stop)

    monkeypatch.setattr(TensorEntry, "read_bytes", fails)
    ahead = ReadAhead(reader, CPU)
    ahead.expect("model.layers.0.")
    with pytest.raises(CheckpointError, match=f"{broken.name}: ends too early"):
        ahead.get(broken.name)
    for name in layer:  # also those that are read after it in the same task
        if name != broken.name:
            assert torch.equal(ahead.get(name), wanted[name])
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
