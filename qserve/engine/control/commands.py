"""Commands of an operator to an engine, and their outcome. Loads no torch.

Names and modes are vLLM's.
"""

from hashlib import sha256

import msgspec

ABORT, WAIT, KEEP = "abort", "wait", "keep"
# what happens to requests that the engine has when it is paused
MODES = {
    ABORT: "they end at once, with the finish reason abort",
    WAIT: "they finish first",
    KEEP: "they stop, and continue later",
}
WEIGHTS, KV_CACHE, CUDA_GRAPH = "weights", "kv_cache", "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)  # graphs come with the pages, to which they point
LEVELS = (0, 1, 2)  # paused; weights on the host; weights dropped
FINGERPRINT_PREFIX = "qs_"
FIRST_VERSION = "0"  # of the weights that an engine starts with


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all commands."""


class PauseGeneration(Command):
    """Stop generation; later requests wait. Done when no step is in flight."""

    mode: str = ABORT
    clear_cache: bool = True  # drop the prefix cache, too


class ResumeGeneration(Command):
    """Continue generation."""


class AbortAll(Command):
    """End all requests. Later requests run as usual."""


class Sleep(Command):
    """Pause generation and give the device's memory back."""

    level: int = 1
    mode: str = ABORT


class WakeUp(Command):
    """Bring back weights, pages or, without tags, all. Generation continues with all."""

    tags: list[str] | None = None


class CudaMemory(msgspec.Struct, frozen=True, kw_only=True):
    """CUDA IPC handle of a tensor, as torch makes it. An empty tensor has a device alone."""

    device: str  # UUID of the GPU, since processes may number GPUs in different ways; or a number
    handle: bytes = b""
    storage_bytes: int = 0
    storage_offset: int = 0
    tensor_offset: int = 0  # in elements
    stride: list[int] = []
    counter: bytes = b""  # of references, in host memory that torch shares
    counter_offset: int = 0
    event: bytes = b""
    has_event: bool = False


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in memory that a trainer on this host shares: a file in memory, or CUDA memory."""

    name: str
    dtype: str  # as torch names it: bfloat16
    shape: list[int]
    path: str = ""  # of the file
    offset: int = 0  # in the file, bytes
    cuda: CudaMemory | None = None  # instead of the file


class BroadcastWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that a trainer broadcasts in a group, in this order."""

    group: str
    names: list[str]
    dtypes: list[str]  # as torch names them, "torch." or not
    shapes: list[list[int]]


class JoinWeightGroup(Command):
    """Join the group in which a trainer, rank 0, broadcasts weights."""

    name: str
    address: str  # of the trainer's store
    port: int
    rank: int
    world_size: int
    backend: str
    timeout: float  # seconds, of joining and of each broadcast


class LeaveWeightGroup(Command):
    """Leave a group."""

    name: str


class ReceiveWeights(Command):
    """Copy a part of the new weights to the host, until UpdateWeights brings the last part."""

    tensors: list[SharedTensor] = []
    broadcast: BroadcastWeights | None = None  # instead of shared tensors
    is_first: bool = False  # drop parts that came before, of an update that did not end


class UpdateWeights(Command):
    """Replace the weights by those of a folder, or by all tensors that were shared."""

    folder: str = ""
    tensors: list[SharedTensor] | None = None  # instead of the folder
    is_first: bool = False  # of tensors: drop parts that came before
    version: str | None = None  # None: the number of updates
    mode: str = WAIT  # KEEP: running requests compute their KV pages again and continue
    is_kept: bool = True  # False: it cannot be read again
    digests: bool = False  # compute them now, not when they are asked for


class GetDigests(Command):
    """Return the digests of the weights."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an engine that commands change."""

    is_paused: bool = False
    is_sleeping: bool = False
    weight_version: str = FIRST_VERSION
    fingerprint: str = ""  # system_fingerprint of the base model's replies
    adapters: dict[str, str] = {}  # digest of the weights of each adapter that was read, by name

    def fingerprint_of(self, adapter: str | None) -> str:
        """The system_fingerprint of replies with an adapter; None: of the base model's."""
        if adapter is None or not self.fingerprint:
            return self.fingerprint
        text = f"{self.fingerprint} {self.adapters.get(adapter, '')}"
        return FINGERPRINT_PREFIX + sha256(text.encode()).hexdigest()[:16]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a command."""

    state: EngineState = EngineState()
    num_requests: int = 0  # aborted
    num_tensors: int = 0  # that ReceiveWeights has brought
    is_complete: bool = False  # they are all tensors of the model's folder
    total_digest: str = ""
    digests: dict[str, str] = {}  # of each tensor, by name
    schemes: dict[str, str] = {}  # of each linear that is rounded, by name


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
