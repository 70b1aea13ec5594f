"""StagedWeights: new contents for a loaded model's tensors, checked before any is copied.

The loader reads new weights as it reads a model, with the same names, shapes, rounding and errors.
On a GPU each finished layer moves to the host, so the device holds the running model plus one
layer. `commit` then copies the new contents into the running model's tensors. Their addresses do
not change, so CUDA graphs stay valid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from formats.errors import InputError
from qserve.model.blocks.layer import Layer
from qserve.model.decoder import Decoder
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.loader import load
from qserve.model.loading.weights import Source
from qserve.model.model_config import ModelConfig
from qserve.model.resident.host_memory import HostMemory
from qserve.model.resident.leaves import leaves, tensors
from qserve.model.resident.memory import bytes_of, storages_of
from qserve.parallel.ranks import ALONE, Ranks

OTHER_MODEL = "the new weights are of another model, or quantized in another way"


class HostCopies:
    """Moves device storages of new layers to host memory."""

    def __init__(self, running: Decoder, host: HostMemory | None = None) -> None:
        """`running`: model whose storages are never moved. `host`: memory for the copies; if it is
        None or full, new memory is allocated.
        """
        self._host = host
        self._running = storages_of(tensors(running))
        self._kept = {storage._cdata for storage in self._running}
        self._of: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}

    def take(self, layer: Layer) -> None:
        """Move a layer's storages to the host, unless they were moved before.

        Storages that torch cannot resize stay where they are: tensors that a trainer shares and
        that the layer uses without a conversion. Their memory is the trainer's.
        """
        for storage in storages_of(tensors(layer)):
            is_ours = storage.nbytes() and storage.resizable()
            if is_ours and storage._cdata not in self._kept:
                self._kept.add(storage._cdata)
                copy = self._room(storage.nbytes())
                self._of[storage._cdata] = storage, copy.copy_(bytes_of(storage), non_blocking=True)
                storage.resize_(0)

    def _room(self, size: int) -> torch.Tensor:
        if self._host is not None:
            try:
                return self._host.take(size)
            except RuntimeError:  # no more host memory can be pinned
                self._host = None
        return torch.empty(size, dtype=torch.uint8)

    def contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or its copy on the host if its storage was moved."""
        found = self._of.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        copy = found[1]
        place = copy.storage_offset() // tensor.itemsize + tensor.storage_offset()
        empty = torch.empty(0, dtype=tensor.dtype)
        return empty.set_(copy.untyped_storage(), place, tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """New contents for the tensors of a running model."""

    pairs: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # (tensor of the model, new contents)
    digests: Mapping[str, str] | None  # tensor name -> digest, if requested

    @torch.inference_mode()
    def commit(self) -> None:
        """Copy the new contents. No step may be launched meanwhile; launched steps run before."""
        for old, new in self.pairs:
            old.copy_(new, non_blocking=True)
        if any(old.device.type == "cuda" for old, _ in self.pairs):
            torch.cuda.synchronize()


@torch.inference_mode()
def stage(
    decoder: Decoder,
    config: ModelConfig,
    source: Source,
    *,
    device: torch.device,
    max_model_len: int,
    kernels: Mapping[str, str] | None,
    digests: bool = False,
    offload: bool | None = None,
    host: HostMemory | None = None,
    ranks: Ranks = ALONE,
) -> StagedWeights:
    """Read and check new weights for a running decoder, without changing it. Raises InputError.

    `digests`: compute a digest of each tensor. `offload`: move finished layers to the host; None:
    only on a GPU. `host`: memory for them. `ranks`: this rank among those of the model.
    """
    copies = HostCopies(decoder, host)
    source.digests = threads = DigestThreads() if digests else None
    moves = device.type == "cuda" if offload is None else offload

    def take(layer: Layer) -> None:
        if threads is not None:
            threads.wait()  # the threads read memory that is freed next
        copies.take(layer)

    try:
        fresh = load(
            config,
            source,
            device=device,
            dtype=decoder.dtype,
            max_model_len=max_model_len,
            progress=False,
            kernels=kernels,
            on_layer=take if moves else None,
            ranks=ranks,
        )
    finally:
        found = None if threads is None else threads.result()
    pairs = [(old, copies.contents(new)) for old, new in _matched(decoder, fresh)]
    return StagedWeights(pairs=tuple(pairs), digests=found)


def _matched(old: Decoder, new: Decoder) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of tensors with the same path. Raises InputError if the models differ."""
    ours, theirs = dict(leaves(old)), dict(leaves(new))
    for path in ours.keys() ^ theirs.keys():
        which = "only the running model has it" if path in ours else "only the new weights have it"
        raise InputError(
            f"weights {path}", f"{which}: {OTHER_MODEL}", "start another server for it"
        )
    for path, one in ours.items():
        other = theirs[path]
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            stated, found = _form(one), _form(other)
            if stated == found:
                yield one, other
                continue
        elif one == other or (one != one and other != other):
            continue
        else:
            stated, found = one, other
        raise InputError(
            f"weights {path}",
            f"expected {stated}, found {found}: {OTHER_MODEL}",
            "start another server for it",
        )


def _form(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}"
