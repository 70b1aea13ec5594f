"""Assignment of adapter slots: random arrivals and ends, with the contents of slots tracked."""

import time
from threading import Event
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import InputError
from qserve.engine.request import Request, Status
from qserve.lora.adapter_table import KEPT_SECONDS, MAX_PASSES, MAX_REPLACED, AdapterTable
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams

MAX_LOOKS = 200


def a_request(table, name, path=None):
    lora = LoRARequest(name, int(name[1:]) + 1, path or f"/adapters/{name}")
    return Request(
        request_id=name,
        token_ids=[1],
        num_prompt_tokens=1,
        max_tokens=1,
        params=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        eos_token_ids=frozenset(),
        adapter=table.find(lora),
    )


class Packed(NamedTuple):
    path: str
    digest: str


class Device:
    """A table whose adapters are their paths, and the contents of its slots."""

    def __init__(self, num_slots, num_on_host=8, broken=()):
        self.slots, self.num_reads, self.broken = {}, 0, broken
        self.now = 0.0  # seconds
        self.version = 0  # of what folders hold
        self.table = AdapterTable(
            self.read,
            self.place,
            num_slots=num_slots,
            num_on_host=num_on_host,
            time=lambda: self.now,
        )
        self.running = []

    def read(self, path, is_wanted):
        self.num_reads += 1
        if path in self.broken:
            raise InputError(path, "is broken")
        return Packed(path, f"{path} {self.version}")

    def place(self, slot, packed):
        users = [each for each in self.running if each.adapter_slot == slot]
        assert not users, "the slot of a running request was filled anew"
        self.slots[slot] = packed

    def add(self, name):
        request = a_request(self.table, name)
        self.table.add(request)
        return request

    def look(self):
        """Take who is ready; returns them in order."""
        ready = []
        for request, error in self.table.take_ready(wait_a_little=True):
            assert error is None
            assert self.slots[request.adapter_slot].path == request.adapter.path
            ready.append(request)
        self.running += ready
        for request in self.running:
            assert self.slots[request.adapter_slot].path == request.adapter.path
        self.table.slots.check_integrity()
        return ready

    def look_until(self, is_enough):
        for _ in range(MAX_LOOKS):
            self.look()
            if is_enough():
                return
        raise AssertionError("nobody gets ready any more")

    def finish(self, request):
        self.running.remove(request)
        request.status = Status.FINISHED


@settings(max_examples=40, deadline=None)
@given(
    num_slots=st.integers(1, 4),
    events=st.lists(st.tuples(st.sampled_from("aaafl"), st.integers(0, 6)), max_size=60),
)
def test_slots_hold_adapters_of_running_requests(num_slots, events):
    device = Device(num_slots, num_on_host=num_slots)
    added = []
    for event, number in events:
        if event == "a":
            added.append(device.add(f"a{number}"))
        elif event == "f" and device.running:
            device.finish(device.running[number % len(device.running)])
        else:
            device.look()
    for _ in range(len(added) + 1):
        device.look_until(lambda: device.running or not device.table.num_waiting)
        for request in list(device.running):
            device.finish(request)
    assert device.table.num_waiting == 0
    assert all(request.status is Status.FINISHED for request in added)
    on_host = [each for each in device.table._known.values() if each.packed is not None]
    assert len(on_host) <= 2 * num_slots  # what is on the device stays, too


def test_slot_wait_delays_others_boundedly():
    device = Device(1)
    device.add("a0")
    device.look_until(lambda: device.running)
    waiting = device.add("a1")
    device.look_until(lambda: waiting.adapter.packed is not None)
    passed = 0
    for _ in range(3 * MAX_PASSES):
        device.add("a0")
        passed += len(device.look())
    assert passed == MAX_PASSES
    for request in list(device.running):
        device.finish(request)
    device.look_until(lambda: device.running)
    assert device.running == [waiting]
    device.finish(waiting)
    device.look_until(lambda: not device.table.num_waiting)  # the others come back
    assert len(device.running) == 2 * MAX_PASSES


def test_least_recently_used_slot_is_replaced():
    device = Device(2)
    for name in ("a0", "a1", "a0"):
        request = device.add(name)
        device.look_until(lambda: device.running)
        device.finish(request)
    device.add("a2")
    device.look_until(lambda: device.running)
    assert sorted(held.name for held in device.table.slots.held()) == ["a0", "a2"]


def test_unreadable_adapter_fails_its_requests_and_is_retried():
    device = Device(1, broken={"/adapters/a3"})
    for _ in range(2):
        requests, fine = [device.add("a3"), device.add("a3")], device.add("a1")
        ready = []
        for _ in range(MAX_LOOKS):
            ready += device.table.take_ready(wait_a_little=True)
            if len(ready) == 3:
                break
        errors = dict(ready)
        assert errors[fine] is None
        assert all("a3: /adapters/a3: is broken" in errors[each] for each in requests)
        fine.status = Status.FINISHED
    assert device.num_reads == 3  # a1 once


def test_changed_contents_change_generation():
    """Pages of the folder's old contents must not be found; pages of equal contents may be."""
    device = Device(1, num_on_host=1)
    generations = []
    for name, version in (("a0", 0), ("a1", 0), ("a0", 0), ("a1", 0), ("a0", 1)):
        device.version = version
        request = device.add(name)
        device.look_until(lambda: device.running)
        generations.append(request.adapter.generation)
        device.finish(request)
    first, other, same, _, changed = generations
    assert first == same and len({first, other, changed}) == 3 and device.num_reads == 5


def test_running_requests_keep_replaced_adapters():
    device = Device(2)
    old = device.add("a0")
    device.look_until(lambda: device.running)
    device.table.put("a0", "/other", Packed("/other", "1"))
    new = a_request(device.table, "a0", "/other")
    device.table.add(new)
    device.look_until(lambda: len(device.running) == 2)
    assert old.adapter is not new.adapter and old.adapter_slot != new.adapter_slot
    assert device.table.remove("a0") and not device.table.remove("a0")
    device.look()  # both go on
    device.finish(old)
    device.finish(new)
    with pytest.raises(InputError, match="adapter a0: unknown"):
        device.table.find(LoRARequest("a0", 1))


def test_outputs_in_progress_keep_adapter_during_reload():
    """The outputs of one API request come one by one: the first may have ended before the last."""
    device = Device(2)
    table = device.table
    table.put("a", "/old", Packed("/old", "1"), 4)
    old = table.find(LoRARequest("a", 4, "/old"))
    first = request_of(old)
    table.add(first)
    device.look_until(lambda: device.running)
    device.finish(first)
    table.put("a", "/new", Packed("/new", "2"), 6)
    new = table.find(LoRARequest("a", 6, "/new"))
    assert new is not old and (new.path, old.path) == ("/new", "/old")
    for number in (4, 5):  # 5: a load that failed
        assert table.find(LoRARequest("a", number, "/old")) is old
    last = request_of(old)
    table.add(last)
    device.look_until(lambda: device.running)
    assert device.num_reads == 0 and device.slots[last.adapter_slot] == Packed("/old", "1")
    with pytest.raises(InputError, match="expected the folder /new, found /third"):
        table.find(LoRARequest("a", 7, "/third"))


def test_outputs_in_progress_keep_adapter_after_unload():
    table = Device(1).table
    table.put("a", "/old", Packed("/old", "1"), 4)
    old = table.find(LoRARequest("a", 4, "/old"))
    table.unload("a")
    table.unload("a")  # nothing is there
    with pytest.raises(InputError, match="adapter a: unknown"):
        table.find(LoRARequest("a", 4))
    table.put("a", "/new", Packed("/new", "2"), 5)
    table.put("a", "/newer", Packed("/newer", "3"), 6)
    found = [table.find(LoRARequest("a", number)) for number in (4, 5, 6)]
    assert found[0] is old and [each.path for each in found[1:]] == ["/new", "/newer"]


def test_replaced_adapters_are_kept_within_limits():
    device, numbers = Device(1), range(1, MAX_REPLACED + 4)
    table = device.table
    for number in numbers:
        table.put("a", f"/{number}", Packed(f"/{number}", str(number)), number)
        device.now += 1
    adapters = [table.find(LoRARequest("a", number)) for number in numbers]
    newest = adapters[-1]
    assert adapters[0] is adapters[1] is newest, "too many: what is there now"
    assert [each.path for each in adapters[2:]] == [f"/{n}" for n in numbers[2:]]
    device.now += KEPT_SECONDS - 4
    kept = [table.find(LoRARequest("a", number)) for number in numbers]
    assert kept[-4:] == adapters[-4:] and {*kept[:-4]} == {newest}
    assert [each.packed is None for each in adapters[-5:]] == [True, False, False, False, False]


def request_of(adapter):
    return a_request(SimpleNamespace(find=lambda lora: adapter), "a0")


def test_adapter_names_ids_and_paths_are_consistent():
    table = Device(1).table
    table.find(LoRARequest("a0", 1, "/x"))
    assert table.find(LoRARequest("a0", 1)).path == "/x"
    with pytest.raises(InputError, match="its id 1 is already used by a0"):
        table.find(LoRARequest("a1", 1, "/y"))
    with pytest.raises(InputError, match="expected the folder /x, found /y"):
        table.find(LoRARequest("a0", 1, "/y"))
    with pytest.raises(InputError, match="adapter a2: unknown"):
        table.find(LoRARequest("a2", 3))


def test_abort_while_waiting_for_adapter():
    device = Device(1)
    device.add("a0")
    device.look_until(lambda: device.running)
    dropped, kept = device.add("a1"), device.add("a1")
    device.look()
    assert device.table.drop(dropped) and not device.table.drop(dropped)
    device.finish(device.running[0])
    device.look_until(lambda: device.running)
    assert device.running == [kept]


def test_adapter_error_fails_only_its_requests():
    device = Device(2)

    def read(path, is_wanted):
        if path.endswith("a1"):
            raise OverflowError("int too large to convert to float")
        return Packed(path, path)

    device.table._read = read
    requests = [device.add(name) for name in ("a1", "a2", "a1")]
    found = {}
    for _ in range(MAX_LOOKS):
        found |= dict(device.table.take_ready(wait_a_little=True))
    assert found[requests[1]] is None
    assert (
        found[requests[0]]
        == found[requests[2]]
        == ("adapter a1: int too large to convert to float")
    )


def test_adapter_load_stops_with_its_last_request():
    device, begun, left = Device(2), Event(), Event()

    def read(path, is_wanted):
        begun.set()
        while path.endswith("a1") and is_wanted():
            time.sleep(0.001)
        if path.endswith("a1"):
            left.set()
            raise InputError(path, "no request waits for it")
        return Packed(path, path)

    device.table._read = read
    first, second = device.add("a1"), device.add("a1")
    other = device.add("a2")
    device.table.take_ready(wait_a_little=False)
    assert begun.wait(60)
    assert device.table.drop(first) and not left.wait(0.05), "another one waits for it"
    assert device.table.drop(second) and left.wait(60)
    ready = []
    while not ready:
        ready = device.table.take_ready(wait_a_little=True)
    assert ready == [(other, None)]
