"""Sums over ranks: choice of the method, division of peer memory, agreement of ranks."""

import struct
from pathlib import Path

import pytest
import torch

from formats.scheme import ActivationSpec
from qkernels import ops, reference
from qkernels.collective import cuda_ipc
from qkernels.collective.channels import PeerLayout, Peers
from qkernels.collective.config import (
    KIB,
    LIMITS,
    MAX_RANKS,
    MIB,
    Limits,
    algorithm_for,
    limits,
    rows_layouts,
    shard_elements,
)
from qkernels.collective.ops import all_reduce_algorithm, fuses
from qkernels.collective.peer_memory import (
    PeerAccessError,
    agreed,
    exchange_by,
    shared_files,
)
from qkernels.errors import KernelError
from qkernels.operands.codes import InputRounding
from qkernels.operands.split_k import SplitKPartials
from qkernels.warm_up import sum_boundaries
from tests.qkernels.virtual_ranks import virtual_ranks

SMALL = Limits(one_shot=64 * KIB, two_shot=128 * KIB, rows=8)
CPU = torch.device("cpu")


def make_peers(ranks: int = 2, channels: int = 1024, equal_shards: bool = True) -> Peers:
    layout = PeerLayout.of_model(ranks, channels, SMALL, equal_shards=equal_shards)
    return Peers(virtual_ranks(ranks, layout.num_bytes, CPU)[0], layout)


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_number_of_shots_grows_with_message_size(ranks):
    found = [algorithm_for(size, limits(ranks)) for size in range(0, 64 * MIB, 64 * KIB)]
    order = ["one_shot", "two_shot", None]
    assert found == sorted(found, key=order.index) and set(found) == set(order)


def test_size_limits_shrink_with_ranks():
    of = list(LIMITS.values())
    assert [each.one_shot for each in of] == sorted((x.one_shot for x in of), reverse=True)
    assert limits(3) == LIMITS[4] and limits(5) == LIMITS[8]


def test_size_limit_is_inclusive():
    assert algorithm_for(SMALL.one_shot, SMALL) == "one_shot"
    assert algorithm_for(SMALL.one_shot + 1, SMALL) == "two_shot"
    assert algorithm_for(SMALL.two_shot + 1, SMALL) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("channels", [64, 4096, 8192, 12288, 16384])
def test_parts_of_rows_cover_them_in_whole_words(ranks, channels):
    for layout in rows_layouts(ranks, channels, 128):
        assert (layout.parts - 1) * layout.part < channels <= layout.parts * layout.part
        assert layout.part * layout.item_bytes % 16 == 0
        assert layout.slot_bytes() % 16 == 0


def test_rows_too_large_for_a_block_have_no_channel():
    assert rows_layouts(2, 2**14 + 8, 128) == () and rows_layouts(2, 1001, 128) == ()
    assert rows_layouts(8, 2**14, 128) == ()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("item", [2, 4])
def test_shards_cover_a_message_and_fit(ranks, item):
    layout = PeerLayout.of_model(ranks, 1024, SMALL)
    for size in (item, 16, 1000 * item, SMALL.two_shot - item, SMALL.two_shot):
        shard = shard_elements(size // item, ranks, item)
        assert shard * ranks * item >= size and shard * item % 16 == 0
        assert shard * item <= layout.shard_bytes


def test_channels_do_not_overlap():
    peers = make_peers(3)
    channels = [peers.flat, peers.scatter, peers.gather, *(each for _, each in peers._rows)]
    spans = sorted(
        (each.words.data_ptr(), each.words.data_ptr() + 4 * each.words.numel()) for each in channels
    )
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    own = peers.memory.own
    assert spans[-1][1] <= own.data_ptr() + own.numel()
    for each in channels:
        assert int(each.bases[0]) == each.words.data_ptr()
        # Triton takes strides that are divisible by 16 for aligned ones
        assert each.slot_words % 16 == 0
        phases = 3 if any(each is of_rows for _, of_rows in peers._rows) else 2
        assert each.words.numel() * 4 >= phases * 2 * each.slot_bytes


def test_partial_sums_are_sent_unrounded_if_channel_exists():
    parts = SplitKPartials(parts=torch.zeros(3, 2, 1024), dtype=torch.float16)
    assert make_peers(2).rows(parts)[0].item_bytes == 4
    assert make_peers(8).rows(parts)[0].item_bytes == 2
    assert make_peers(2).rows(parts.total())[0].item_bytes == 2


@pytest.mark.parametrize(("ranks", "item_bytes"), [(2, 4), (8, 2)])
def test_unequal_shards_have_one_channel_and_algorithm_for_both_forms(ranks, item_bytes):
    peers = make_peers(ranks, equal_shards=False)
    parts = SplitKPartials(parts=torch.zeros(3, 4, 1024), dtype=torch.float16)
    for x in (parts, parts.total()):
        layout, channel = peers.rows(x)
        assert layout.item_bytes == item_bytes and channel is peers.rows(parts)[1]
    rows = SMALL.one_shot // 2048  # float32 partial sums of them are twice as large
    parts = SplitKPartials(parts=torch.zeros(3, rows, 1024), dtype=torch.float16)
    assert {all_reduce_algorithm(x, peers) for x in (parts, parts.total())} == {"one_shot"}
    assert all_reduce_algorithm(parts, make_peers(ranks)) == "two_shot"


def test_rows_summed_and_normalized_in_one_kernel():
    peers = make_peers()
    groups = InputRounding(ActivationSpec(type="float", per="group"), None)
    x = torch.zeros(8, 1024, dtype=torch.float16)
    assert fuses(x, None, peers) and fuses(x, InputRounding(ActivationSpec(), None), peers)
    assert not fuses(x, groups, peers)
    assert not fuses(x.new_zeros(9, 1024), None, peers)
    assert not fuses(x.new_zeros(8, 512), None, peers)


def test_arguments_are_checked():
    peers = make_peers()
    x = torch.zeros(2, 1024, dtype=torch.float16)
    too_large = torch.zeros(SMALL.two_shot // 2 + 1, dtype=torch.float16)
    assert all_reduce_algorithm(too_large, peers) is None
    with pytest.raises(KernelError, match=f"at most {SMALL.two_shot} bytes"):
        ops.all_reduce(too_large, peers)
    with pytest.raises(KernelError, match="residual: expected .2, 1024."):
        ops.all_reduce_norm(x, x[:1], None, peers)
    with pytest.raises(KernelError, match="x: expected float16"):
        ops.all_reduce(x.long(), peers)
    with pytest.raises(KernelError, match="expected 2 to 8, found 9"):
        PeerLayout.of_model(9, 1024)
    with pytest.raises(KernelError, match="on 2 ranks, found .* on 3"):
        Peers(virtual_ranks(3, 1 << 20, CPU)[0], peers.layout)


def test_reference_rounds_once():
    shares = [torch.tensor([x], dtype=torch.float16) for x in (1.0, 2.0**-11, 2.0**-11)]
    assert reference.all_reduce(shares) == torch.tensor([1 + 2.0**-10], dtype=torch.float16)


def test_warm_up_rows_reach_every_method():
    of = LIMITS[2]
    rows = sum_boundaries(of, 8192, 2)
    assert {algorithm_for(M * 8192 * 2, of) for M in rows} == {"one_shot", "two_shot", None}
    assert 5 in rows and of.rows + 1 in rows


def test_all_ranks_raise_the_error_of_one():
    def refuse() -> bytes:
        raise PeerAccessError("GPU 1", "has no peer access to GPU 0")

    def exchange(message: bytes) -> list[bytes]:
        return [b"+mine", message]

    assert agreed(exchange, lambda: b"yours") == [b"mine", b"yours"]
    with pytest.raises(PeerAccessError, match="peer memory of rank 1: GPU 1: has no peer access"):
        agreed(exchange, refuse)


@pytest.mark.parametrize(
    "places, access, reason",
    [
        ([(0, b"here"), (1, b"here")], True, None),
        ([(0, b"here"), (1, b"there")], True, "rank 1: is on another host"),
        ([(0, b"here"), (1, b"here")], False, "GPU 0: has no peer access to GPU 1"),
        ([(0, b"here"), (0, b"here")], False, None),
        ([(0, b"here"), (2, b"here")], True, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_ranks_without_peer_access_are_reported(monkeypatch, places, access, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: access)
    if reason is None:
        assert cuda_ipc._check_places(0, places) == b""
        return
    with pytest.raises(PeerAccessError, match=reason):
        cuda_ipc._check_places(0, places)


class FakeDriver:
    """Memory of two ranks by number. It refuses the operations that a test names."""

    def __init__(self, refused: str = "") -> None:
        self.refused, self.freed, self.closed = refused, [], []

    def call(self, name: str, *arguments: object) -> None:
        if name == self.refused:
            raise PeerAccessError(f"CUDA's {name}", "CUDA_ERROR_NOT_SUPPORTED (801)")
        if name == "cuMemAlloc_v2":
            arguments[0]._obj.value = 4096
        elif name == "cuIpcGetMemHandle":
            arguments[0]._obj.reserved = b"handle of 4096"
        elif name == "cuIpcOpenMemHandle_v2":
            assert bytes(arguments[1])[:14] == b"handle of 8192"
            arguments[0]._obj.value = 77

    def cuMemFree_v2(self, pointer) -> None:  # noqa: N802  the driver's name
        self.freed.append(pointer.value)

    def cuIpcCloseMemHandle(self, pointer) -> None:  # noqa: N802
        self.closed.append(pointer.value)


def with_driver(monkeypatch, driver: FakeDriver) -> None:
    for name in ("set_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    monkeypatch.setattr(cuda_ipc, "_call", driver.call)
    monkeypatch.setattr(cuda_ipc, "_driver", lambda: driver)
    monkeypatch.setattr(cuda_ipc._Buffer, "tensor", lambda self: torch.empty(0))


def second_rank(message: bytes) -> list[bytes]:
    """Return the messages that the other rank would send at the same time."""
    if not message.startswith(b"+"):
        return [message, b"+"]
    if message[1:9] == struct.pack("<q", 0):
        return [message, b"+" + struct.pack("<q", 1) + message[9:]]
    return [message, message.replace(b"4096", b"8192")]


def test_handles_are_exchanged_and_closed(monkeypatch):
    driver = FakeDriver()
    with_driver(monkeypatch, driver)
    memory = cuda_ipc.open_peer_memory(0, 1 << 20, CPU, second_rank)
    assert memory.addresses == (4096, 77) and memory.ranks == 2
    memory.close()
    assert driver.freed == [4096] and driver.closed == [77]


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_driver_error_is_quoted(monkeypatch, name):
    driver = FakeDriver(refused=name)
    with_driver(monkeypatch, driver)
    with pytest.raises(PeerAccessError, match=f"rank 0: CUDA's {name}: CUDA_ERROR_NOT_SUPPORTED"):
        cuda_ipc.open_peer_memory(0, 1 << 20, CPU, second_rank)
    assert driver.freed == ([] if name == "cuMemAlloc_v2" else [4096])


def test_group_messages_of_any_length(tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        exchange = exchange_by(dist.group.WORLD)
        assert exchange(b"") == [b""] and exchange(b"abc\0") == [b"abc\0"]
    finally:
        dist.destroy_process_group()


def test_peer_memory_from_files(tmp_path):
    def exchange(message: bytes) -> list[bytes]:
        other = Path(tmp_path / "rank1")
        other.write_bytes(b"\xff" * 512)
        return [message, str(other).encode()]

    memory = shared_files(0, 512, tmp_path, exchange)
    assert bytes(memory.own.tolist()) == b"\xff" * 512 and memory.ranks == 2
    memory.own[:4] = 7
    assert (tmp_path / "rank0").read_bytes()[:5] == b"\7\7\7\7\xff"
