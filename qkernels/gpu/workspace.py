"""Split-K workspaces: one buffer for each device and stream, at a fixed address."""

import torch

from qkernels.errors import KernelError

# partial sums of all splits: 16 MiB of float32
WORKSPACE_FLOATS = 2**22
WORKSPACE_COUNTERS = 4096  # output tiles that may be split

Workspace = tuple[torch.Tensor, torch.Tensor]
# (device, stream, True during CUDA graph capture) -> workspace
_WORKSPACES: dict[tuple[torch.device, int, bool], Workspace] = {}
# CUDA device -> spare workspace for the next capturing stream: a capture cannot zero memory
_SPARES: dict[torch.device, Workspace] = {}


def workspace(device: torch.device) -> Workspace:
    """Return the partial sums and counters of split-K kernels for the current stream of `device`.

    Kernels that share a workspace must run one after another, which a stream guarantees, and must
    leave every counter at zero. The size and address of a workspace never change, so captured CUDA
    graphs stay valid. Memory grows by 16 MiB for each stream that is used, not with calls.

    Graphs may be replayed on any stream, so they do not use the workspace of eager calls. Graphs
    that were captured on one stream share a workspace; to replay two graphs at the same time,
    capture them on two streams. Raises KernelError in a capture without an eager call before it.
    """
    if device.type != "cuda":
        return _kept(device, 0, False)
    stream, captures = _current_stream(device)
    if captures:
        return _WORKSPACES.get((device, stream, True)) or _take_spare(device, stream)
    if device not in _SPARES:
        _SPARES[device] = _allocate(device)
        torch.cuda.current_stream(device).synchronize()  # a graph may run on another stream
    return _kept(device, stream, False)


def _kept(device: torch.device, stream: int, captures: bool) -> Workspace:
    key = device, stream, captures
    return _WORKSPACES.get(key) or _WORKSPACES.setdefault(key, _allocate(device))


def _take_spare(device: torch.device, stream: int) -> Workspace:
    spare = _SPARES.pop(device, None)
    if spare is None:
        raise KernelError(
            "CUDA graph capture",
            f"no split-K workspace is left on {device} for this capturing stream",
            "call the operation once outside of the capture, before it",
        )
    return _WORKSPACES.setdefault((device, stream, True), spare)


def _current_stream(device: torch.device) -> tuple[int, bool]:
    """Return the stream that Triton launches on, and True if a CUDA graph is being captured."""
    from triton.runtime import driver  # a CPU may lack triton

    stream = driver.active.get_current_stream(device.index)
    return stream, torch.cuda.is_current_stream_capturing()


def _allocate(device: torch.device) -> Workspace:
    partials = torch.empty(WORKSPACE_FLOATS, dtype=torch.float32, device=device)
    return partials, torch.zeros(WORKSPACE_COUNTERS, dtype=torch.int32, device=device)
