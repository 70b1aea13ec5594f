"""Memory of sleeping tensors: given back, and brought again under every view of it."""

import pytest
import torch

from qserve.model.resident import memory
from qserve.model.resident.memory import SleepingMemory


def test_contents_and_views_come_back():
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
    bytes_of, calls = memory._bytes_of, []

    def runs_out(storage):
        calls.append(storage)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA error: out of memory")
        return bytes_of(storage)

    monkeypatch.setattr(memory, "_bytes_of", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        SleepingMemory(tensors, keeps=True, moves=True)
    assert (tensors[0] == 3).all() and (tensors[1] == 4).all()


def test_restore_that_fails_gives_all_back_and_can_be_repeated(monkeypatch):
    tensors = [torch.full((100,), 3.0), torch.full((50,), 4.0)]
    asleep = SleepingMemory(tensors, keeps=True, moves=True)
    room = [1]
    bytes_of = memory._bytes_of

    def runs_out(storage):
        if not room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        room.pop()
        return bytes_of(storage)

    monkeypatch.setattr(memory, "_bytes_of", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        asleep.restore()
    assert all(each.untyped_storage().nbytes() == 0 for each in tensors)
    room += [1, 1]
    asleep.restore()
    assert tensors[0][0] == 3 and tensors[1][0] == 4
