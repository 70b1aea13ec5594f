"""Connection between the leader and a rank: calls are answered when they end, or not at all.

The rank is a thread here, at the other end of a socket pair.
"""

import socket
import threading
from concurrent.futures import Future

import pytest

from formats.errors import InputError
from qserve.engine.distributed import rank_process
from qserve.engine.distributed.rank_channel import BEGIN, RankChannel, RankDiedError, call, unpack
from qserve.engine.distributed.rank_group import RankGroup
from qserve.processes import frames

WAIT_SECONDS = 60  # a guard against hanging, never reached


class Handle:
    def describe_end(self):
        return "it was unplugged"

    def end(self):
        pass


class FakeRankEnd:
    """A rank whose calls the test answers."""

    def __init__(self, rank, on_death):
        ours, self.connection = socket.socketpair()
        self.link = RankChannel(rank, ours, Handle(), on_death)
        self.line = rank_process._LeaderConnection(self.connection)

    def next_call(self):
        return unpack(frames.receive(self.connection))


@pytest.fixture
def two():
    """A group of two ranks, and their remote ends."""
    ends = []

    def make(on_death):
        ends.extend(FakeRankEnd(rank, on_death) for rank in (1, 2))
        return [end.link for end in ends]

    rank_group = RankGroup(make)
    yield rank_group, ends
    rank_group.close()


def test_later_call_can_finish_first(two):
    rank_group, ends = two
    slow, fast = rank_group.begin("read", 5), rank_group.begin("read", 6)
    for rank, end in enumerate(ends):
        calls = [end.next_call() for _ in range(2)]
        assert [each[0] for each in calls] == [BEGIN, BEGIN]
        works = {}
        for _, number, name, value in calls:
            assert name == "read"
            end.line.answer_later(number, works.setdefault(value, Future()))
        works[6].set_result(60 + rank)
        assert fast[rank].result(WAIT_SECONDS) == 60 + rank and not slow[rank].done()
        works[5].set_result([1, 2])
        assert slow[rank].result(WAIT_SECONDS) == (1, 2)


def test_failed_call_does_not_end_the_rank(two):
    rank_group, (one, other) = two
    first, second = rank_group.begin("read", 1)
    found = Future()
    one.line.answer_later(one.next_call()[1], found)
    found.set_exception(InputError("the folder", "is empty", "fill it"))
    with pytest.raises(InputError, match=r"rank 1: the folder: is empty \(fill it\)"):
        first.result(WAIT_SECONDS)
    found = Future()
    other.line.answer_later(other.next_call()[1], found)
    found.set_exception(MemoryError("no room"))
    with pytest.raises(InputError, match="rank 2: MemoryError: no room"):
        second.result(WAIT_SECONDS)
    rank_group.send("launch", 3)
    assert one.next_call() == ("launch", 3), "calls go on"
    one.line.send("reply", 4)
    other.line.send("reply", 5)
    assert rank_group.replies() == [[4], [5]]


def test_calls_to_a_lost_rank_end(two):
    rank_group, (one, other) = two
    first, second = rank_group.begin("read", 1)
    one.connection.close()
    error = "rank 1 died: it was unplugged"
    with pytest.raises(RankDiedError, match=error):
        first.result(WAIT_SECONDS)
    assert not second.done()
    with pytest.raises(RankDiedError, match=error):
        rank_group.begin("read", 2)
    with pytest.raises(RankDiedError, match=error):
        one.link.begin("read", 2).result(WAIT_SECONDS)
    rank_group.close()
    with pytest.raises(RankDiedError, match="rank 2 died: it was closed"):
        second.result(WAIT_SECONDS)


def test_concurrent_threads_do_not_interleave_frames(two):
    """Threads that read adapters call in parallel with the thread that launches steps."""
    rank_group, (one, other) = two
    text = "x" * 6_000_000  # more than a socket buffer holds
    count, found = 3, {"a": 0, "b": 0}

    def send(name):
        for _ in range(count):
            one.link.send(call(name, text))

    threads = [threading.Thread(target=send, args=(name,)) for name in found]
    for thread in threads:
        thread.start()
    for _ in range(2 * count):
        name, value = one.next_call()
        assert value == text
        found[name] += 1
    assert found == {"a": count, "b": count}
    for thread in threads:
        thread.join()
