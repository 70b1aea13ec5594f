"""Layout of a rank's transfer buffer, and which heads another rank reads from it.

A buffer has S slots of one page, or of one state, each. It is stored tensor by tensor: S times the
first tensor of a page, then S times the second, and so on. So consecutive slots take one copy per
tensor. The tensors are those of `Cache.page_tensors` or `Cache.slot_tensors`, in the order of
layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from formats.errors import InputError
from qserve.kv_transfer.config import FLAG

ALIGNMENT = 256  # bytes; of each tensor's section of the buffer
VERSION = 2


class PageTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's shard of a tensor of a layer's page or state."""

    layer: int
    shape: list[int]  # without the page dimension
    dtype: str
    item_bytes: int
    # Axis of `shape` along which heads or channels are sharded; None: all ranks have equal contents
    axis: int | None
    # The ranges (first, stop) of heads or channels that this rank has, in the order in which it has
    # them along the axis. They count the heads of all ranks together. Empty if `axis` is None.
    ranges: list[tuple[int, int]] = []

    @property
    def num_bytes(self) -> int:
        size = self.item_bytes
        for each in self.shape:
            size *= each
        return size

    @property
    def places(self) -> Iterator[tuple[int, int, int]]:
        """For each range: its first head, its stop, and the index of its first head in the tensor.

        A replicated tensor has one range with one head.
        """
        index = 0
        for first, stop in self.ranges if self.axis is not None else [(0, 1)]:
            yield first, stop, index
            index += stop - first

    @property
    def whole_shape(self) -> list[int]:
        """The shape without the axis of heads."""
        return [size for axis, size in enumerate(self.shape) if axis != self.axis]

    def view(self, bytes_X: torch.Tensor) -> torch.Tensor:
        """View bytes as pages [N, ...]."""
        return bytes_X.view(getattr(torch, self.dtype)).view(-1, *self.shape)


class BufferFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one rank's buffer. Other engines read it as JSON.

    A buffer of states has states instead of pages.
    """

    version: int = VERSION
    of_states: bool = False
    engine: str  # random name, the same on all ranks of an engine
    rank: int
    num_ranks: int
    model: str  # path or name of the model, for messages
    digest: str  # digest of everything that pages depend on (model_digest.py)
    form: dict[str, str]  # the facts in it besides the model, by name, for messages
    tensors: list[PageTensor]
    num_slots: int
    process: int  # process id
    device: str  # "cpu", or the UUID of a GPU
    handle: str = ""  # CUDA IPC handle in hexadecimal digits
    address: int = 0  # address in that process

    @property
    def offsets(self) -> list[int]:
        """Start of each tensor's section of the buffer, and the end of the last section."""
        found = [0]
        for tensor in self.tensors:
            size = self.num_slots * tensor.num_bytes
            found.append(found[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        return found

    @property
    def page_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def layer_ends(self) -> list[int]:
        """For each layer with tensors, the number of tensors up to its end."""
        count = len(self.tensors)
        layers = [tensor.layer for tensor in self.tensors]
        return [i + 1 for i in range(count) if i + 1 == count or layers[i + 1] != layers[i]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Heads that this rank reads from one rank of another engine."""

    rank: int  # rank of the other engine
    start: int  # index of the first head in the other rank's tensor
    target: int  # index of the first head in this rank's tensor
    count: int  # number of heads


def widened(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View both tensors as int64 if strides allow it, because indexed copies are then faster."""
    if all(_is_wide(each) for each in (a, b)):
        return a.view(torch.int64), b.view(torch.int64)
    return a, b


def _is_wide(tensor: torch.Tensor) -> bool:
    units = 8 // tensor.itemsize
    numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(number % units == 0 for number in numbers)


def mismatch(ours: BufferFacts, theirs: BufferFacts) -> str:
    """Return the reason why pages of another engine cannot be used; "" if they can."""
    if theirs.version != ours.version:
        return f"version of the connector: expected {ours.version}, found {theirs.version}"
    for name, expected in ours.form.items():
        if (found := theirs.form.get(name)) != expected:
            return f"{name}: expected {expected}, found {found}"
    if theirs.digest != ours.digest:
        return f"model: expected the weights and settings of {ours.model}, found {theirs.model}"
    return ""


def sources(own: Sequence[PageTensor], peers: Sequence[Sequence[PageTensor]]) -> list[list[Source]]:
    """Return, for each tensor of this rank, the ranks of another engine that hold its heads.

    `peers`: tensors of each rank of the other engine. Raises InputError if a head is missing.
    """
    found = []
    for number, tensor in enumerate(own):
        parts: list[Source] = []
        for first, stop, target in tensor.places:
            while first < stop:
                part = _source_of(tensor, number, (first, stop), target, peers)
                if part is None:
                    raise InputError(
                        f"{FLAG} peer",
                        f"layer {tensor.layer}: no rank of the other engine holds head {first}",
                        "use tensor parallel sizes that divide the heads on both sides",
                    )
                parts.append(part)
                first, target = first + part.count, target + part.count
        found.append(parts)
    return found


def _source_of(
    tensor: PageTensor,
    number: int,
    heads: tuple[int, int],
    target: int,
    peers: Sequence[Sequence[PageTensor]],
) -> Source | None:
    """Find the first rank that holds the first of `heads`; include the others that it holds.

    `target`: index of that head in this rank's tensor.
    """
    for rank, tensors in enumerate(peers):
        if number >= len(tensors):
            continue
        theirs = tensors[number]
        alike = (theirs.layer, theirs.dtype, theirs.axis, theirs.whole_shape)
        if alike != (tensor.layer, tensor.dtype, tensor.axis, tensor.whole_shape):
            continue
        for first, stop, index in theirs.places:
            if first <= heads[0] < stop:
                count = min(stop, heads[1]) - heads[0]
                start = index + heads[0] - first
                return Source(rank=rank, start=start, target=target, count=count)
    return None
