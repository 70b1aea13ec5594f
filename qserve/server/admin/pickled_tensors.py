"""Reads the tensor handles in SGLang's weight messages without unpickling the messages.

A message is a pickle by torch.multiprocessing: names of tensors, and handles of memory that a
trainer on this host shares. The reader accepts only the functions and classes listed here, and
calls none of them. Loads no torch.
"""

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from formats.errors import InputError
from qserve.engine.control.commands import CudaMemory, SharedTensor
from qserve.server.admin.pickle_reader import Made, Name, read_pickle

FLATTENED = "flattened_bucket"  # load_format: several tensors packed into one tensor of bytes
HEADER_BYTES = 64  # header of torch's shared-memory files, before the contents
MEMORY = "/dev/shm"
TRAINERS = "send what SGLang's trainers send: shared tensors, pickled by torch"  # remedy
MESSAGE = "serialized_named_tensors"
# torch dtype -> bytes per element
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
REDUCTIONS = "torch.multiprocessing.reductions"
CUDA_TENSORS = (
    Name(REDUCTIONS, "rebuild_cuda_tensor"),
    Name("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"),
    Name("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"),
)
TENSOR = Name(REDUCTIONS, "rebuild_tensor")
TYPED_STORAGE = Name(REDUCTIONS, "rebuild_typed_storage")
FILE = Name(REDUCTIONS, "rebuild_storage_filename")
DESCRIPTOR = Name(REDUCTIONS, "rebuild_storage_fd")
SIZE = Name("torch", "Size")
PART = Name("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata")
# exceptions that a malformed message can cause
_BROKEN = (TypeError, ValueError, LookupError, AttributeError, RecursionError, msgspec.MsgspecError)
# classes that hold one message per rank, each with a copy of the same tensor
COPIES = tuple(
    Name(f"sglang.srt.model_executor.{module}", "LocalSerializedTensor")
    for module in ("model_runner", "model_runner_components.weight_updater")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor in shared memory. `offset` and `stride` count elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    path: str = ""  # shared-memory file
    cuda: dict[str, Any] | None = None  # fields of CudaMemory, for a GPU tensor

    def named(self, name: str) -> SharedTensor:
        """Return the SharedTensor with this name. Raises InputError for a non-contiguous file."""
        given = {"name": name, "dtype": self.dtype, "shape": list(self.shape)}
        if self.cuda is not None:
            place = {"tensor_offset": self.offset, "stride": list(self.stride)}
            return SharedTensor(**given, cuda=CudaMemory(**self.cuda, **place))
        if self.stride != _contiguous(self.shape) and math.prod(self.shape):
            raise InputError(f"tensor {name:.200}", "is not contiguous", "send .contiguous()")
        offset = HEADER_BYTES + self.offset * ITEM_BYTES[self.dtype]
        return SharedTensor(**given, path=self.path, offset=offset)

    def part(self, start: int, dtype: str, shape: tuple[int, ...]) -> "_Tensor":
        """Return the tensor that starts at byte `start` of this uint8 tensor."""
        first, item = self.offset + start, ITEM_BYTES[dtype]
        if self.dtype != "uint8" or first % item:
            raise InputError(
                MESSAGE, f"a {dtype} tensor begins at byte {first} of {self.dtype}", TRAINERS
            )
        return _Tensor(
            dtype=dtype,
            shape=shape,
            stride=_contiguous(shape),
            offset=first // item,
            path=self.path,
            cuda=self.cuda,
        )


def tensors_of(message: str, load_format: str | None) -> list[SharedTensor]:
    """Return the tensors in a base64 message. Raises InputError.

    load_format: None for (name, tensor) pairs, or "flattened_bucket"
    """
    if load_format not in (None, FLATTENED):
        raise InputError(
            "load_format",
            f"expected {FLATTENED} or none, found {load_format!r:.60}",
            "leave it out for (name, tensor) pairs",
        )
    try:
        data = base64.b64decode(message, validate=True)
    except binascii.Error:
        raise InputError(
            MESSAGE, "is not base64", "encode the pickled bytes with base64.b64encode"
        ) from None
    try:
        content = read_pickle(data)
        if load_format is None:
            found = [_tensor(each).named(_text(name)) for name, each in content]
        else:
            whole = _tensor(content["flattened_tensor"])
            found = [_part(whole, each) for each in content["metadata"]]
        # the engine's process must be able to decode them
        return msgspec.json.decode(msgspec.json.encode(found), type=list[SharedTensor])
    except InputError:
        raise
    except _BROKEN as error:
        problem = f"is not what SGLang's trainers send: {error!s:.200}"
        raise InputError(MESSAGE, problem, TRAINERS) from None


def _part(whole: _Tensor, found: Made) -> SharedTensor:
    """Return one tensor of a flattened bucket."""
    _check(found, PART)
    start, dtype, shape = (found.state[name] for name in ("start_idx", "dtype", "shape"))
    return whole.part(start, _dtype(dtype), _sizes(shape)).named(_text(found.state["name"]))


def _tensor(found: object) -> _Tensor:
    """Return a tensor. If each rank has a copy of it, read the first: all copies are equal."""
    if isinstance(found, Made) and found.by in COPIES:
        found = read_pickle(found.state["values"][0])
    if not isinstance(found, Made):
        raise InputError(MESSAGE, f"expected a tensor, found {type(found).__name__}", TRAINERS)
    _check(found, *CUDA_TENSORS, TENSOR)
    return _of_file(*found.arguments) if found.by == TENSOR else _of_gpu(*found.arguments)


def _of_gpu(cls: object, shape: object, stride: object, offset: int, *rest: Any) -> _Tensor:
    """Return a GPU tensor from the arguments of torch's rebuild_cuda_tensor."""
    (_, dtype, device, handle, storage_bytes, storage_offset, _) = rest[:7]
    (counter, counter_offset, event, has_event) = rest[7:]
    return _Tensor(
        dtype=_dtype(dtype),
        shape=_sizes(shape),
        stride=_sizes(stride),
        offset=offset,
        cuda={
            "device": str(device),
            "handle": handle or b"",
            "storage_bytes": storage_bytes,
            "storage_offset": storage_offset,
            "counter": counter or b"",
            "counter_offset": counter_offset or 0,
            "event": event or b"",
            "has_event": bool(has_event),
        },
    )


def _of_file(cls: object, storage: Made, metadata: tuple) -> _Tensor:
    """Return a CPU tensor in a shared-memory file from the arguments of torch's rebuild_tensor."""
    _check(storage, TYPED_STORAGE)
    (file, dtype), (offset, shape, stride, _) = storage.arguments, metadata
    _check(file, FILE)
    (_, _, handle, _) = file.arguments[:4]
    return _Tensor(
        dtype=_dtype(dtype),
        shape=_sizes(shape),
        stride=_sizes(stride),
        offset=offset,
        path=MEMORY + handle.decode(),
    )


def _check(found: Made, *expected: Name) -> None:
    """Raise InputError unless one of the `expected` functions makes the object."""
    if found.by in expected:
        return
    remedy = "send tensors that torch.multiprocessing shares"
    if found.by == DESCRIPTOR:
        remedy = 'call torch.multiprocessing.set_sharing_strategy("file_system")'
    raise InputError(MESSAGE, f"names {found.by}, which is not accepted", remedy)


def _dtype(found: Name) -> str:
    if found.module != "torch" or found.name not in ITEM_BYTES:
        raise InputError(MESSAGE, f"names {found}, which is not accepted", TRAINERS)
    return found.name


def _sizes(found: object) -> tuple[int, ...]:
    """Return a shape or stride as a tuple of numbers."""
    if isinstance(found, Made):
        _check(found, SIZE)
        (found,) = found.arguments
    return tuple(int(size) for size in found)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise InputError(
            MESSAGE, f"expected a tensor's name, found {type(name).__name__}", TRAINERS
        )
    return name
