"""Memory of sleeping tensors: given back, and brought again under every view of it."""

import pytest
import torch

from qserve.model.resident import host_memory, memory
from qserve.model.resident.host_memory import ALIGNMENT, HostMemory
from qserve.model.resident.memory import SleepingMemory
from qserve.model.resident.staged import HostCopies


def test_contents_and_views_are_restored():
    base = torch.arange(24, dtype=torch.float32).clone().reshape(4, 6)
    view, other = base[1:3, ::2], torch.full((5,), 7, dtype=torch.int8)
    wanted = base.clone(), view.clone(), other.clone()
    asleep = SleepingMemory([base, view, other], keeps=True, moves=True)
    assert asleep.num_bytes == 24 * 4 + 5  # a storage of two tensors counts once
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    asleep.restore()
    for own, expected in zip((base, view, other), wanted, strict=True):
        assert torch.equal(own, expected)
    view.fill_(-1)
    assert (base[1:3, ::2] == -1).all()  # still one memory


def test_dropped_contents_are_zeros():
    pages = torch.full((3, 4), float("nan"))
    asleep = SleepingMemory([pages], keeps=False)
    assert pages.untyped_storage().nbytes() == 0
    asleep.restore()
    assert torch.equal(pages, torch.zeros(3, 4))


def test_memory_that_cannot_be_resized_stays():
    shared = torch.arange(4)
    shared.numpy()
    asleep = SleepingMemory([shared], keeps=False)
    assert asleep.num_bytes == 0 and shared.tolist() == [0, 1, 2, 3]


def test_sleep_without_room_on_the_host_changes_nothing(monkeypatch):
    tensors = [torch.full((100,), 3.0), torch.full((50,), 4.0)]
    bytes_of, calls = memory.bytes_of, []

    def runs_out(storage):
        calls.append(storage)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return bytes_of(storage)

    monkeypatch.setattr(memory, "bytes_of", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        SleepingMemory(tensors, keeps=True, moves=True)
    assert (tensors[0] == 3).all() and (tensors[1] == 4).all()


def test_failed_restore_frees_memory_and_can_be_retried(monkeypatch):
    tensors = [torch.full((100,), 3.0), torch.full((50,), 4.0)]
    asleep = SleepingMemory(tensors, keeps=True, moves=True)
    room = [1]
    bytes_of = memory.bytes_of

    def runs_out(storage):
        if not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        room.pop()
        return bytes_of(storage)

    monkeypatch.setattr(memory, "bytes_of", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        asleep.restore()
    assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
    room += [1, 1]
    asleep.restore()
    assert tensors[0][0] == 3 and tensors[1][0] == 4


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 4 * ALIGNMENT)


def test_memory_pieces_do_not_overlap_and_are_reused(small_chunks):
    host = HostMemory(pinned=False)
    sizes = [1, ALIGNMENT, 3 * ALIGNMENT - 7, 0, 5 * ALIGNMENT, 9]
    for _ in range(3):
        host.reset()
        pieces = [host.take(size).fill_(number) for number, size in enumerate(sizes)]
        for number, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
            assert piece.nbytes == size and (piece == number).all()
            assert piece.storage_offset() % ALIGNMENT == 0
        assert host.num_bytes == (4 + 4 + 5) * ALIGNMENT


def test_weights_sleep_in_memory_that_is_used_again(small_chunks):
    host = HostMemory(pinned=False)
    one, other = torch.arange(700.0), torch.arange(900, dtype=torch.int16)
    for _ in range(2):
        host.reset()
        asleep = SleepingMemory([one, other], keeps=True, moves=True, host=host)
        size, own_size = one.untyped_storage().nbytes(), host.num_bytes
        assert (size, own_size) == (0, 700 * 4 + 4 * ALIGNMENT)
        asleep.restore()
        assert torch.equal(one, torch.arange(700.0)) and other.tolist() == list(range(900))


class Running:
    """A model with no tensors."""


def test_copies_on_the_host_have_the_tensors_layout(small_chunks):
    host = HostMemory(pinned=False)
    host.take(3)
    layer = torch.nn.Module()
    layer.base = torch.arange(40, dtype=torch.float32).reshape(5, 8)
    layer.view, layer.half = layer.base[1:4, ::2], torch.arange(9, dtype=torch.float16)
    wanted = layer.base.clone(), layer.view.clone(), layer.half.clone()
    for given in (host, None):
        copies = HostCopies(Running(), given)
        copies.take(layer)
        size = layer.base.untyped_storage().nbytes()
        assert size == 0
        for tensor, expected in zip((layer.base, layer.view, layer.half), wanted, strict=True):
            found = copies.contents(tensor)
            assert torch.equal(found, expected) and found.stride() == tensor.stride()
        for tensor, expected in zip((layer.base, layer.half), (wanted[0], wanted[2]), strict=True):
            tensor.untyped_storage().resize_(expected.nbytes)
            tensor.copy_(expected)


def test_trainer_memory_is_not_moved(tmp_path):
    """Torch cannot resize memory that another process shares, such as a router used unconverted."""
    path = tmp_path / "shared"
    path.write_bytes(bytes(range(64)))
    layer = torch.nn.Module()
    layer.shared = torch.from_file(str(path), size=64, dtype=torch.uint8)
    layer.own = torch.arange(9, dtype=torch.float16)
    copies = HostCopies(Running())
    copies.take(layer)
    assert layer.own.untyped_storage().nbytes() == 0
    assert copies.contents(layer.shared) is layer.shared
    assert layer.shared.tolist() == list(range(64))
    assert copies.contents(layer.own).tolist() == list(range(9))


@pytest.mark.gpu
def test_large_tensors_reach_the_host(monkeypatch):
    monkeypatch.setattr(host_memory, "LARGE_BYTES", 1000)
    for shape, dtype in (((300, 5001), torch.float32), ((7,), torch.int8), ((0, 4), torch.float16)):
        tensor = torch.randn(shape, device="cuda").to(dtype)
        found = host_memory.to_host(tensor)
        assert found.device.type == "cpu" and torch.equal(found, tensor.cpu())
    turned = torch.randn(4000, 300, device="cuda").t()
    assert torch.equal(host_memory.to_host(turned), turned.cpu())
