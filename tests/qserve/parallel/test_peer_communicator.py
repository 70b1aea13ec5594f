"""Choice between peer memory and the process group, and its log line."""

import logging

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("triton")

from formats.scheme import ActivationSpec
from qkernels import ops
from qkernels.collective import cuda_ipc, symmetric_memory
from qkernels.collective import ops as collective
from qkernels.collective.channels import PeerLayout
from qkernels.collective.pair_sum import PairSum
from qkernels.collective.peer_memory import PeerAccessError
from qkernels.operands.codes import InputRounding
from qserve.parallel.peer_communicator import PeerCommunicator, over_peer_memory
from qserve.parallel.row_chunks import MIN_ROWS
from qserve.parallel.torch_communicator import TorchCommunicator
from tests.qkernels.virtual_ranks import virtual_ranks

CPU = torch.device("cpu")
HIDDEN = 64


@pytest.fixture
def group(monkeypatch):
    """A process group of two, of which this is the first. Nothing is exchanged."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return TorchCommunicator("group")


@pytest.fixture
def calls(monkeypatch):
    """Names of the operations that ran; the results are the arguments."""
    found = []

    def noted(name, result):
        def call(*arguments, **named):
            found.append(name)
            return result(*arguments)

        return call

    for owner, name, result in (
        (collective, "all_reduce", lambda x, peers: x),
        (collective, "all_reduce_norm", lambda x, residual, *rest: (x, residual)),
        (TorchCommunicator, "all_reduce", lambda self, x: x),
        (ops, "norm", lambda x, residual, *rest: (x, residual)),
    ):
        label = f"torch.{name}" if owner is TorchCommunicator else name
        monkeypatch.setattr(owner, name, noted(label, result))
    return found


def refuse(*arguments):
    raise PeerAccessError("GPU 0", "has no peer access to GPU 1 (rank 1)", "use NCCL")


def one_of_virtual(rank, num_bytes, device, exchange):
    return virtual_ranks(2, num_bytes, CPU)[rank]


def opened(monkeypatch, group, max_rows=0) -> PeerCommunicator:
    monkeypatch.setattr(cuda_ipc, "open_peer_memory", one_of_virtual)
    small = PeerLayout.of_model(2, HIDDEN).limits
    monkeypatch.setattr(
        "qkernels.collective.channels.limits",
        lambda ranks: type(small)(one_shot=8192, two_shot=16384, rows=8),
    )
    communicator = over_peer_memory(group, HIDDEN, CPU, max_rows)
    assert isinstance(communicator, PeerCommunicator)
    return communicator


def test_small_sums_use_peer_memory(monkeypatch, group, calls):
    communicator = opened(monkeypatch, group)
    communicator.all_reduce(torch.zeros(4096, dtype=torch.float16))
    communicator.all_reduce(torch.zeros(8192, dtype=torch.float16))
    communicator.all_reduce(torch.zeros(8193, dtype=torch.float16))
    communicator.all_reduce(torch.zeros(5, dtype=torch.int32))
    assert calls == ["all_reduce", "all_reduce", "torch.all_reduce", "torch.all_reduce"]


def test_norm_and_sum_of_few_rows_are_one_kernel(monkeypatch, group, calls):
    communicator = opened(monkeypatch, group)
    groups = InputRounding(ActivationSpec(type="float", per="group"), None)

    def norm(rows: int, form=None) -> list[str]:
        calls.clear()
        x = torch.zeros(rows, HIDDEN, dtype=torch.float16)
        communicator.norm(x, x, None, form, ops.Branch())
        return calls

    assert norm(8) == ["all_reduce_norm"]
    assert norm(9) == ["all_reduce", "norm"]
    assert norm(2, groups) == ["all_reduce", "norm"]
    assert norm(200) == ["torch.all_reduce", "norm"]


def test_fixed_order_uses_one_kernel_for_any_rows(monkeypatch, group, calls):
    group.fixed_order = True
    communicator = opened(monkeypatch, group)
    x = torch.arange(20_001).half()
    assert torch.equal(communicator.all_reduce(x), x)  # more than two shots take at a time
    assert calls == ["all_reduce"] * 3
    for rows in (1, 8, 9, 200):
        calls.clear()
        x = torch.zeros(rows, HIDDEN, dtype=torch.float16)
        normed, _ = communicator.norm(x, x, None, None, ops.Branch())
        assert normed.shape == x.shape
        assert set(calls) == {"all_reduce", "norm"}


def test_missing_peer_memory_is_logged_once(monkeypatch, group, caplog):
    monkeypatch.setattr(cuda_ipc, "open_peer_memory", refuse)
    monkeypatch.setattr(symmetric_memory, "open_peer_memory", refuse)
    with caplog.at_level(logging.INFO):
        assert over_peer_memory(group, HIDDEN, CPU) is group
    (line,) = caplog.messages
    assert "only NCCL" in line and "GPU 0: has no peer access to GPU 1" in line


def test_symmetric_memory_is_used_if_ipc_handles_fail(monkeypatch, group, caplog):
    monkeypatch.setattr(cuda_ipc, "open_peer_memory", refuse)
    monkeypatch.setattr(
        symmetric_memory, "open_peer_memory", lambda *place: one_of_virtual(*place[:4])
    )
    with caplog.at_level(logging.INFO):
        assert isinstance(over_peer_memory(group, HIDDEN, CPU), PeerCommunicator)
    (line,) = caplog.messages
    assert "peer memory on each rank" in line


def test_sums_in_chunks_of_rows(monkeypatch, group):
    communicator = opened(monkeypatch, group, max_rows=MIN_ROWS)
    x = torch.zeros(MIN_ROWS, HIDDEN, dtype=torch.bfloat16)
    assert isinstance(communicator.begin_sum(x), PairSum)
    assert isinstance(communicator.begin_sum(x[: MIN_ROWS // 2].float()), PairSum)
    assert communicator.begin_sum(x.float()) is None  # too large for the buffer
    assert communicator.begin_sum(x.int()[:4]) is None
    communicator.overlaps = False
    assert communicator.begin_sum(x) is None


def test_short_steps_allocate_no_chunked_sum_buffers(monkeypatch, group):
    communicator = opened(monkeypatch, group, max_rows=MIN_ROWS - 1)
    assert communicator.peers.pair is None
    assert communicator.begin_sum(torch.zeros(8, HIDDEN, dtype=torch.bfloat16)) is None
    assert group.begin_sum(torch.zeros(8, HIDDEN)) is None, "NCCL's blocks wait for the product"


def test_too_many_ranks_for_peer_memory(monkeypatch, group, caplog):
    group.size = 16
    assert over_peer_memory(group, HIDDEN, CPU) is group
    assert "expected 2 to 8, found 16" in caplog.text


def test_check_raises_for_lost_rank(monkeypatch, group):
    communicator = opened(monkeypatch, group)
    communicator.check()
    communicator.peers._report.fill_(2)
    with pytest.raises(ValueError, match="rank 1 did not send its data"):
        communicator.check()


def test_warm_up_covers_every_method(monkeypatch, group):
    rows = opened(monkeypatch, group).row_boundaries(HIDDEN, torch.float16)
    # few rows, more, one shot alone up to 8192 bytes, two shots up to 16384, NCCL
    assert {1, 5, 9, 65, 129} <= set(rows) and MIN_ROWS not in rows
    communicator = opened(monkeypatch, group, max_rows=MIN_ROWS)
    assert MIN_ROWS in communicator.row_boundaries(HIDDEN, torch.float16)
