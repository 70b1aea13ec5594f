"""Operator commands to an engine, and their outcomes. This module does not import torch.

Names and modes are vLLM's.
"""

from collections.abc import Iterable
from hashlib import sha256

import msgspec

ABORT, WAIT, KEEP = "abort", "wait", "keep"
# pause modes: what happens to the engine's requests
MODES = {
    ABORT: "they end at once, with the finish reason abort",
    WAIT: "they finish first",
    KEEP: "they stop, and continue later",
}
WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)  # CUDA graphs point to KV pages and wake up with them
LEVELS = (0, 1, 2)  # of sleep: 0: pause only; 1: weights move to the host; 2: weights are dropped
FINGERPRINT_PREFIX = "qs_"
FIRST_VERSION = "0"  # version of the weights that an engine starts with


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands."""


class PauseGeneration(Command):
    """Pause generation; new requests wait. The command ends when no step is in flight."""

    mode: str = ABORT
    clear_cache: bool = True  # empty the prefix cache


class ResumeGeneration(Command):
    """Resume generation."""


class AbortAll(Command):
    """Abort all requests. Later requests run as usual."""


class Sleep(Command):
    """Pause generation and free the device's memory."""

    level: int = 1
    mode: str = ABORT


class WakeUp(Command):
    """Bring weights or KV pages back to the device. Generation resumes when all are back."""

    tags: list[str] | None = None  # None: all

    @classmethod
    def of(cls, tags: Iterable[str] | None) -> "WakeUp":
        """Return the command for some tags; a text is one tag."""
        return cls(tags=[tags] if isinstance(tags, str) else None if tags is None else [*tags])


class CudaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """CUDA IPC handle of a tensor, as torch makes it. An empty tensor has only `device` set."""

    device: str  # UUID or number of the GPU; processes may number GPUs in different ways
    handle: bytes = b""
    storage_bytes: int = 0
    storage_offset: int = 0
    tensor_offset: int = 0  # in elements
    stride: list[int] = []
    counter: bytes = b""  # torch's reference counter, in shared host memory
    counter_offset: int = 0
    event: bytes = b""
    has_event: bool = False


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a trainer on this host shares, in an in-memory file or in CUDA memory."""

    name: str
    dtype: str  # torch's name, such as bfloat16
    shape: list[int]
    path: str = ""  # file with the tensor
    offset: int = 0  # bytes from the file's start
    cuda: CudaMemory | None = None  # used instead of the file


class BroadcastWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptions of the tensors that a trainer broadcasts in a group, in this order."""

    group: str
    names: list[str]
    dtypes: list[str]  # torch's names, with or without "torch."
    shapes: list[list[int]]


class JoinWeightGroup(Command):
    """Join the group in which a trainer, rank 0, broadcasts weights."""

    name: str
    address: str  # host of the trainer's TCPStore
    port: int
    rank: int
    world_size: int
    backend: str
    timeout: float  # seconds; for joining and for each broadcast


class LeaveWeightGroup(Command):
    """Leave a weight group."""

    name: str


class ReceiveWeights(Command):
    """Copy one part of the new weights to the host. UpdateWeights brings the last part."""

    tensors: list[SharedTensor] = []
    broadcast: BroadcastWeights | None = None  # used instead of shared tensors
    is_first: bool = False  # drop earlier parts, left from an unfinished update


class UpdateWeights(Command):
    """Replace the weights with those of a folder, or with all shared tensors received so far."""

    folder: str = ""
    tensors: list[SharedTensor] | None = None  # last part; used instead of the folder
    is_first: bool = False  # `tensors` is the only part: drop earlier parts
    version: str | None = None  # None: the number of updates
    mode: str = WAIT  # KEEP: running requests recompute their KV pages and continue
    is_kept: bool = True  # False: the folder cannot be read again later
    digests: bool = False  # compute digests now; otherwise GetDigests computes them


class GetDigests(Command):
    """Return the digests of the weights."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine that commands change."""

    is_paused: bool = False
    is_sleeping: bool = False
    weight_version: str = FIRST_VERSION
    fingerprint: str = ""  # system_fingerprint of the base model's replies
    adapters: dict[str, str] = {}  # name -> digest of the weights, for adapters that were read

    def fingerprint_of(self, adapter: str | None) -> str:
        """Return system_fingerprint for replies with an adapter; None: with the base model."""
        if adapter is None or not self.fingerprint:
            return self.fingerprint
        text = f"{self.fingerprint} {self.adapters.get(adapter, '')}"
        return FINGERPRINT_PREFIX + sha256(text.encode()).hexdigest()[:16]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a command."""

    state: EngineState = EngineState()
    num_requests: int = 0  # number of aborted requests
    num_tensors: int = 0  # number of tensors that ReceiveWeights has brought
    is_complete: bool = False  # these tensors include all of the model's folder
    total_digest: str = ""
    digests: dict[str, str] = {}  # tensor name -> digest
    schemes: dict[str, str] = {}  # name of a linear that is rounded while loading -> scheme


AnyCommand = (
    PauseGeneration
    | ResumeGeneration
    | AbortAll
    | Sleep
    | WakeUp
    | JoinWeightGroup
    | LeaveWeightGroup
    | ReceiveWeights
    | UpdateWeights
    | GetDigests
)
