"""A rank reads the rows that it computes with, and has the weights that it had with all rows."""

import dataclasses
from collections import Counter

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.files.tensor_entry import TensorEntry
from formats.scheme import Scheme
from qserve.config import EngineConfig
from qserve.engine.sizes import read_model
from qserve.model.loading.loader import load
from qserve.model.loading.read_ahead import ReadAhead
from qserve.model.loading.weight_source import WeightSource
from qserve.model.resident.leaves import leaves
from qserve.model.tp_plan import LinearShard
from qserve.parallel.ranks import ALONE
from tests.qserve.model.variants import edited
from tests.qserve.parallel.in_threads import ThreadCommunicator, ThreadGroup

CPU = torch.device("cpu")
BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture
def quantized(docs_5m, made_once):
    """Folder of docs-5m by scheme; `float`: itself."""

    def make(scheme):
        if scheme == "float":
            return docs_5m

        text = f"{scheme}-g32" if scheme.startswith("w4a16") else scheme
        settings = {"recipe": "rtn", "output_format": "compressed-tensors", "progress": False}

        def write(folder):
            quantize_checkpoint(docs_5m, folder, scheme=Scheme.parse(text), **settings)

        return made_once(f"rows-{scheme}", write)

    return make


@pytest.fixture
def loaded(monkeypatch):
    """loaded(folder, rank, size) -> (leaves of the decoder, bytes read of each tensor)."""
    spans = []  # (file, first byte, end) of each read, which may hold several tensors
    read_bytes = TensorEntry.read_bytes

    def count(self, start, stop):
        spans.append((self.file, self.offset + start, self.offset + stop))
        return read_bytes(self, start, stop)

    monkeypatch.setattr(TensorEntry, "read_bytes", count)

    def by_tensor(entries):
        read = Counter()
        for file, start, stop in spans:
            for name, entry in entries.items():
                end = entry.offset + entry.num_bytes
                if entry.file == file and entry.offset < stop and start < end:
                    read[name] += min(stop, end) - max(start, entry.offset)
        return dict(read)

    def run(folder, rank, size):
        model = read_model(EngineConfig(model=str(folder), device="cpu"))
        ranks = dataclasses.replace(ALONE, communicator=ThreadCommunicator(ThreadGroup(size), rank))
        reader = CheckpointReader(folder)
        spans.clear()
        decoder = load(
            model,
            WeightSource(reader, model),
            device=CPU,
            dtype=torch.float32,
            max_model_len=64,
            progress=False,
            ranks=ranks if size > 1 else ALONE,
        )
        found = {path: leaf for path, leaf in leaves(decoder) if isinstance(leaf, torch.Tensor)}
        return found, by_tensor(reader.entries), reader.entries

    return run


def is_by_output(name, entry):
    """True for a tensor whose rows are a linear's outputs, and for which a rank needs some."""
    linear, _, field = name.rpartition(".")
    return linear.endswith(BY_OUTPUT) and field != "weight_shape" and len(entry.shape) == 2


@pytest.mark.parametrize("scheme", ["float", "w4a16-sym", "w8a8", "w8a8-fp8"])
def test_ranks_read_only_their_rows_after_first_layer(scheme, quantized, loaded, monkeypatch):
    folder = quantized(scheme)
    _, whole, entries = loaded(folder, 0, 1)
    assert whole == {name: each.num_bytes for name, each in entries.items() if name in whole}
    for rank in range(2):
        found, read, _ = loaded(folder, rank, 2)
        halved = {n for n, e in entries.items() if is_by_output(n, e) and "layers.0." not in n}
        assert len(halved) >= 5 * 3
        for name, count in read.items():
            assert count * (2 if name in halved else 1) == whole[name], name
        with monkeypatch.context() as patch:
            patch.setattr(LinearShard, "ranges", None)
            wanted, all_read, _ = loaded(folder, rank, 2)
        assert all_read == whole, "a rank used to read all"
        assert found.keys() == wanted.keys()
        for path, leaf in wanted.items():
            assert torch.equal(found[path], leaf), path


@pytest.mark.parametrize("scheme", ["w4a16-asym", "w8a8-fp8-block"])
def test_linears_with_other_fields_are_read_whole(scheme, quantized, loaded, monkeypatch):
    """Packed zeros, scales of blocks."""
    folder = quantized(scheme)
    found, read, entries = loaded(folder, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(LinearShard, "ranges", None)
        wanted, all_read, _ = loaded(folder, 1, 2)
    assert read == all_read and found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        assert torch.equal(found[path], leaf), path


@pytest.mark.parametrize("scheme", ["float", "w4a16-sym"])
def test_tensor_of_another_shape_is_refused(scheme, quantized, loaded, tmp_path):
    field = "weight" if scheme == "float" else "weight_packed"
    name = f"model.layers.2.mlp.up_proj.{field}"

    def shorten(tensors):
        tensors[name] = tensors[name][:-32].clone()

    folder = edited(quantized(scheme), tmp_path / "short", shorten)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj"):
        loaded(folder, 0, 2)


def test_layers_that_need_other_rows_get_them(docs_5m, monkeypatch):
    """Rows that the layer before had read ahead for them are not used."""
    reader = CheckpointReader(docs_5m)
    ahead = ReadAhead(reader, CPU)
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(4)]
    wanted = [reader.get(name) for name in names]
    ahead.expect("model.layers.0.")
    ahead.expect("model.layers.1.")
    found = ahead.get_rows(names[0], ((3, 5), (1, 2)))
    assert torch.equal(found, wanted[0][[3, 4, 1]])
    assert torch.equal(ahead.get_rows(names[1], ((3, 5), (1, 2))), wanted[1][[3, 4, 1]])
    ahead.expect("model.layers.2.")
    ahead.expect("model.layers.3.")
    assert torch.equal(ahead.get_rows(names[2], ((0, 2),)), wanted[2][:2])
    assert torch.equal(ahead.get(names[3]), wanted[3])
    ahead.close()
