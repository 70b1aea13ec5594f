"""Split-K workspaces: kernels that may run at the same time never share a workspace."""

from types import SimpleNamespace

import pytest
import torch

from qkernels.errors import KernelError
from qkernels.gpu import workspace as module
from qkernels.gpu.workspace import workspace

GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


class Streams:
    """The current stream of every device, as (stream, whether it captures), set by a test."""

    def __init__(self) -> None:
        self.current = 0, False
        self.allocated = 0

    def of(self, device: torch.device) -> tuple[int, bool]:
        return self.current

    def allocate(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self.current[1], "memory that a capture allocates is zeroed at replays only"
        self.allocated += 1
        return torch.empty(64), torch.zeros(16, dtype=torch.int32)

    def on(self, stream: int, captures: bool = False, device: torch.device = GPU) -> set[int]:
        """Addresses of the workspace that a kernel on this stream would take."""
        self.current = stream, captures
        partials, counters = workspace(device)
        assert not counters.any()
        return {partials.data_ptr(), counters.data_ptr()}


@pytest.fixture
def streams(monkeypatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(module, "_WORKSPACES", {})
    monkeypatch.setattr(module, "_SPARES", {})
    monkeypatch.setattr(module, "_current_stream", streams.of)
    monkeypatch.setattr(module, "_allocate", streams.allocate)
    idle = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: idle)
    return streams


def test_streams_and_devices_share_no_workspace(streams):
    used = [streams.on(stream) for stream in (0, 7, 9)]
    used += [streams.on(stream, device=OTHER_GPU) for stream in (0, 7)]
    used += [streams.on(0, captures=True), streams.on(7, captures=True, device=OTHER_GPU)]
    assert len(set.union(*used)) == 2 * len(used)


def test_stream_keeps_its_workspace(streams):
    first = streams.on(0), streams.on(7), streams.on(7, captures=True)
    streams.on(0)
    allocated = streams.allocated
    for _ in range(100):
        assert (streams.on(0), streams.on(7), streams.on(7, captures=True)) == first
    assert streams.allocated == allocated, "memory grows with streams, not with calls"


def test_graphs_captured_on_two_streams_may_run_concurrently(streams):
    streams.on(0)
    one = streams.on(1, captures=True)
    streams.on(0)
    two = streams.on(2, captures=True)
    assert not one & two and one == streams.on(1, captures=True)


def test_capture_without_a_workspace_is_refused(streams):
    with pytest.raises(KernelError, match="call the operation once outside of the capture"):
        streams.on(1, captures=True)


def test_cpu_has_one_workspace():
    partials, counters = workspace(torch.device("cpu"))
    assert partials is workspace(torch.device("cpu"))[0] and not counters.any()
    assert counters.numel() == module.WORKSPACE_COUNTERS
    assert partials.numel() == module.WORKSPACE_FLOATS
