"""Share tensors between processes of one host: in-memory files and CUDA IPC handles.

The trainer calls `shared_tensors`, the engine `open_tensors`. The trainer sends only numbers, names
and handles (commands.SharedTensor); nothing is pickled.
"""

import contextlib
import errno
import math
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from formats.errors import InputError
from qserve.engine.control.commands import CudaMemory, SharedTensor

MEMORY = Path("/dev/shm")  # folder of in-memory files on Linux
PREFIX = "qserve-tensors-"  # prefix of the names of files that `shared_tensors` makes
TORCH_PREFIX = "torch_"  # prefix of files that torch.multiprocessing makes; no others are opened
ALIGNMENT = 64  # bytes; of each tensor in a file
PART_BYTES = 2**31  # bytes to share at a time, if tensors are produced one after the other
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}

NamedTensors = Iterable[tuple[str, torch.Tensor]]


@contextlib.contextmanager
def shared_tensors(
    tensors: Mapping[str, torch.Tensor] | NamedTensors,
) -> Iterator[list[SharedTensor]]:
    """Share tensors with other processes of this host until the end of the `with` block.

    CPU tensors are copied to an in-memory file. GPU tensors are shared without a copy: they must
    not change inside the block.
    """
    named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    on_host = [(name, each.detach()) for name, each in named if each.device.type == "cpu"]
    places, size = [], 0
    for _, tensor in on_host:
        places.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    path = ""
    try:
        if on_host:
            file, path = tempfile.mkstemp(prefix=PREFIX, dir=_folder())
            with os.fdopen(file, "wb") as opened:
                _reserve(opened.fileno(), size)
            for (_, tensor), place in zip(on_host, places, strict=True):
                _view(path, place, tensor.dtype, tensor.shape, shared=True).copy_(tensor)
        offset_of = dict(zip((name for name, _ in on_host), places, strict=True))
        yield [
            SharedTensor(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                path=path if name in offset_of else "",
                offset=offset_of.get(name, 0),
                cuda=None if name in offset_of else _cuda_memory(tensor.detach()),
            )
            for name, tensor in named
        ]
    finally:
        if path:
            os.unlink(path)


def in_parts(
    named: NamedTensors, part_bytes: int | None
) -> Iterator[tuple[list[tuple[str, torch.Tensor]], bool]]:
    """Yield lists of tensors with at most `part_bytes` bytes each, and True with the last list.

    A single tensor may be larger than `part_bytes`.
    """
    part: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in named:
        if part and part_bytes is not None and size + tensor.nbytes > part_bytes:
            yield part, False
            part, size = [], 0
        part.append((name, tensor))
        size += tensor.nbytes
    yield part, True


def open_tensors(shared: Sequence[SharedTensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) without copying. Raises InputError if a description is wrong."""
    for each in shared:
        name, dtype = f"tensor {each.name:.200}", DTYPES.get(each.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            raise InputError(name, f"has the unknown dtype {each.dtype!r:.40}", f"known: {known}")
        if any(not 0 <= size < 2**40 for size in (*each.shape, each.offset)):
            raise InputError(
                name,
                f"has the shape {each.shape!s:.80}, offset {each.offset}",
                "send the tensor's own shape and offset",
            )
        if each.cuda is not None:
            yield each.name, _open_cuda(each, dtype, name)
            continue
        _check_file(each, dtype.itemsize, name)
        yield each.name, _view(each.path, each.offset, dtype, each.shape, shared=False)


def _reserve(file: int, size: int) -> None:
    """Allocate a file's memory. Raises InputError if there is too little memory."""
    try:
        if size:
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise InputError(
            str(_folder()),
            f"has no room for {size / 2**30:.2f} GiB of shared tensors",
            "make it larger (in a container: --shm-size), or share fewer at a time",
        ) from None


def _folder() -> Path:
    return MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())


def _check_file(shared: SharedTensor, item_bytes: int, name: str) -> None:
    """Raise InputError unless the tensor lies in a file made by `shared_tensors` or torch."""
    path, num_bytes = Path(shared.path), item_bytes * math.prod(shared.shape)
    if path.parent != _folder() or not path.name.startswith((PREFIX, TORCH_PREFIX)):
        raise InputError(
            name,
            f"is not in a file {_folder() / PREFIX}* or {TORCH_PREFIX}*,"
            f" found {shared.path!r:.200}",
            "send it with qserve.training, or share it with torch.multiprocessing",
        )
    try:
        found = path.lstat()
    except OSError as error:
        raise InputError(
            name, f"its file cannot be read: {error}", "keep it until the update has ended"
        ) from None
    if not stat.S_ISREG(found.st_mode) or shared.offset % item_bytes:
        raise InputError(
            name,
            "is not in a regular file, or not aligned there",
            "share the tensor again, and keep it until the update has ended",
        )
    if shared.offset + num_bytes > found.st_size:
        raise InputError(
            name,
            f"its bytes {shared.offset} to {shared.offset + num_bytes} are not in its file of"
            f" {found.st_size} bytes",
            "share the tensor again, and keep it until the update has ended",
        )


def _view(
    path: str, offset: int, dtype: torch.dtype, shape: Sequence[int], *, shared: bool
) -> torch.Tensor:
    """Return a tensor over one part of a file. Writes reach the file if `shared` is True."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    end = offset + count * dtype.itemsize
    whole = torch.from_file(path, shared=shared, size=end, dtype=torch.uint8)
    return whole[offset:].view(dtype).view(tuple(shape))


def _cuda_memory(tensor: torch.Tensor) -> CudaMemory:
    if tensor.numel() == 0:  # an empty tensor has no memory and no handle
        uuid = torch.cuda.get_device_properties(tensor.device).uuid
        return CudaMemory(device=str(uuid))
    _, arguments = reduce_tensor(tensor)
    (_, _, stride, offset, _, _, device, handle, storage_bytes, storage_offset) = arguments[:10]
    (_, counter, counter_offset, event, has_event) = arguments[10:]
    return CudaMemory(
        device=str(torch.cuda.get_device_properties(device).uuid),
        handle=handle,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        tensor_offset=offset,
        stride=list(stride),
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        has_event=has_event,
    )


def _open_cuda(shared: SharedTensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    memory = shared.cuda
    uuids = [
        str(torch.cuda.get_device_properties(number).uuid)
        for number in range(torch.cuda.device_count())
    ]
    device = memory.device
    if device.isdecimal() and int(device) < len(uuids):  # a number, as torch sends it
        device = uuids[int(device)]
    if device not in uuids:
        raise InputError(
            name,
            f"is on the GPU {device!r:.60}, which this engine does not see",
            "share it from a GPU of the engine, or from the host's memory",
        )
    if math.prod(shared.shape) == 0:
        where = torch.device("cuda", uuids.index(device))
        return torch.empty(shared.shape, dtype=dtype, device=where)
    try:
        return rebuild_cuda_tensor(
            torch.Tensor,
            torch.Size(shared.shape),
            tuple(memory.stride),
            memory.tensor_offset,
            torch.UntypedStorage,
            dtype,
            uuids.index(device),
            memory.handle,
            memory.storage_bytes,
            memory.storage_offset,
            False,
            memory.counter,
            memory.counter_offset,
            memory.event,
            memory.has_event,
        )
    except RuntimeError as error:
        raise InputError(
            name, f"its CUDA handle cannot be opened: {error!s:.200}", "keep the tensor alive"
        ) from None
