"""Descriptions of tensors in SGLang's messages, read without running what they contain.

The messages are pickles that torch.multiprocessing makes: names, and handles of memory that a
trainer on this host shares. Only the functions and classes listed here are accepted, and each
stands for a record of its arguments. Loads no torch.
"""

import base64
import binascii
import io
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from formats.errors import InputError
from qserve.engine.control.commands import CudaMemory, SharedTensor

FLATTENED = "flattened_bucket"  # load_format of one tensor of bytes that holds several
HEADER_BYTES = 64  # before the contents of torch's files in memory
MEMORY = "/dev/shm"
MESSAGE = "serialized_named_tensors"
DEPTH = 2  # a message, and messages of single tensors inside it
# bytes of an element, by torch's names
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}


class _Dtype(str):
    """Name of a dtype. Nothing of it can be changed."""

    __slots__ = ()


class _Call:
    """A function that a message may call. Nothing of it can be changed."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise TypeError("cannot be changed")

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


class _Sealed(type):
    """Class of classes that a message may name, and cannot change."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise TypeError("cannot be changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A storage in a file in memory."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor in shared memory; `offset` and `stride` in elements of the dtype."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    memory: _File | CudaMemory

    def named(self, name: str) -> SharedTensor:
        """Return the description under a name. Raises InputError if a stride does not fit."""
        given = {"name": name, "dtype": self.dtype, "shape": list(self.shape)}
        if isinstance(self.memory, CudaMemory):
            values = {name: getattr(self.memory, name) for name in CudaMemory.__struct_fields__}
            values |= {"tensor_offset": self.offset, "stride": list(self.stride)}
            return SharedTensor(**given, cuda=CudaMemory(**values))
        if self.stride != _contiguous(self.shape) and math.prod(self.shape):
            raise InputError(f"tensor {name:.200}", "is not contiguous", "send .contiguous()")
        offset = HEADER_BYTES + self.offset * ITEM_BYTES[self.dtype]
        return SharedTensor(**given, path=self.memory.path, offset=offset)

    def part(self, start: int, dtype: str, shape: tuple[int, ...]) -> "_Tensor":
        """Return the tensor that begins at a byte of this one, which has bytes."""
        first, item = self.offset + start, ITEM_BYTES[dtype]
        if self.dtype != "uint8" or first % item:
            raise InputError(MESSAGE, f"a {dtype} tensor begins at byte {first} of {self.dtype}")
        return _Tensor(
            dtype=dtype,
            shape=shape,
            stride=_contiguous(shape),
            offset=first // item,
            memory=self.memory,
        )


class _Class(metaclass=_Sealed):
    """A class of which only its place among the arguments matters."""


class _Local(metaclass=_Sealed):
    """SGLang's LocalSerializedTensor: a message for each rank's copy of one tensor."""

    values: Sequence[bytes]


class _Part(metaclass=_Sealed):
    """SGLang's FlattenedTensorMetadata: one tensor in a tensor of bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: _Dtype
    start_idx: int


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[i + 1 :]) for i in range(len(shape)))


def _cuda_tensor(*arguments: Any) -> _Tensor:
    """torch.multiprocessing.reductions.rebuild_cuda_tensor"""
    (_, shape, stride, offset, _, dtype, device, handle, storage_bytes, storage_offset) = arguments[
        :10
    ]
    (_, counter, counter_offset, event, has_event) = arguments[10:]
    return _Tensor(
        dtype=str(dtype),
        shape=tuple(shape),
        stride=tuple(stride),
        offset=offset,
        memory=CudaMemory(
            device=str(device),
            handle=handle or b"",
            storage_bytes=storage_bytes,
            storage_offset=storage_offset,
            tensor_offset=0,
            counter=counter or b"",
            counter_offset=counter_offset or 0,
            event=event or b"",
            has_event=bool(has_event),
        ),
    )


def _file_storage(cls: object, manager: bytes, handle: bytes, size: int, *rest: Any) -> _File:
    """torch.multiprocessing.reductions.rebuild_storage_filename"""
    return _File(path=MEMORY + handle.decode())


def _typed_storage(storage: _File, dtype: _Dtype) -> tuple[_File, str]:
    """torch.multiprocessing.reductions.rebuild_typed_storage"""
    return storage, str(dtype)


def _file_tensor(cls: object, storage: tuple[_File, str], metadata: tuple) -> _Tensor:
    """torch.multiprocessing.reductions.rebuild_tensor"""
    (file, dtype), (offset, shape, stride, _) = storage, metadata
    return _Tensor(
        dtype=dtype, shape=tuple(shape), stride=tuple(stride), offset=offset, memory=file
    )


REDUCTIONS = "torch.multiprocessing.reductions"
KNOWN: dict[tuple[str, str], object] = {
    (REDUCTIONS, "rebuild_cuda_tensor"): _Call(_cuda_tensor),
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): _Call(_cuda_tensor),
    ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"): _Call(_cuda_tensor),
    (REDUCTIONS, "rebuild_storage_filename"): _Call(_file_storage),
    (REDUCTIONS, "rebuild_typed_storage"): _Call(_typed_storage),
    (REDUCTIONS, "rebuild_tensor"): _Call(_file_tensor),
    ("torch", "Size"): tuple,
    **{("torch", name): _Dtype(name) for name in ITEM_BYTES},
    **dict.fromkeys(
        (
            ("torch", "Tensor"),
            ("torch.nn.parameter", "Parameter"),
            ("torch.storage", "TypedStorage"),
            ("torch.storage", "UntypedStorage"),
        ),
        _Class,
    ),
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): _Part,
    **{
        (f"sglang.srt.model_executor.{module}", "LocalSerializedTensor"): _Local
        for module in ("model_runner", "model_runner_components.weight_updater")
    },
}
DESCRIPTORS = ("multiprocessing.resource_sharer", "multiprocessing.reduction")


class _Reader(pickle.Unpickler):
    """Unpickler that calls nothing but the records above."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in KNOWN:
            return KNOWN[module, name]
        remedy = "send tensors that torch.multiprocessing shares"
        if module in DESCRIPTORS or name == "rebuild_storage_fd":
            remedy = 'call torch.multiprocessing.set_sharing_strategy("file_system")'
        raise InputError(MESSAGE, f"names {module:.80}.{name:.80}, which is not accepted", remedy)


def tensors_of(message: str, load_format: str | None) -> list[SharedTensor]:
    """Read a message, in base64. Raises InputError.

    `load_format`: None for pairs of a name and a tensor; "flattened_bucket".
    """
    if load_format not in (None, FLATTENED):
        raise InputError("load_format", f"expected {FLATTENED} or none, found {load_format!r:.60}")
    try:
        content = _read(base64.b64decode(message, validate=True))
    except binascii.Error:
        raise InputError(MESSAGE, "is not base64") from None
    try:
        if load_format is None:
            return [_tensor(each).named(_text(name)) for name, each in content]
        whole = _tensor(content["flattened_tensor"])
        return [
            whole.part(part.start_idx, str(part.dtype), tuple(part.shape)).named(_text(part.name))
            for part in content["metadata"]
        ]
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise _malformed(error) from None


def _tensor(found: object) -> _Tensor:
    """A tensor, or that of the first rank: each rank's copy has all values."""
    if isinstance(found, _Local):
        found = _read(found.values[0])
    if not isinstance(found, _Tensor):
        raise InputError(MESSAGE, f"expected a tensor, found {type(found).__name__}")
    return found


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise InputError(MESSAGE, f"expected a tensor's name, found {type(name).__name__}")
    return name


def _read(data: bytes) -> Any:
    try:
        return _Reader(io.BytesIO(data)).load()
    except InputError:
        raise
    except Exception as error:  # a pickle can fail in any way
        raise _malformed(error) from None


def _malformed(error: Exception) -> InputError:
    return InputError(MESSAGE, f"is not what SGLang's trainers send: {error!s:.200}")
