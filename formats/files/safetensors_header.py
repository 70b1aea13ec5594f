"""Header of a safetensors file: the tensors it declares, checked against the file."""

import json
import struct
from pathlib import Path
from typing import Any

import torch

from formats.errors import CHECK_ACCESS, DOWNLOAD_AGAIN, CheckpointError
from formats.files.json_file import parse_int, size_of_file
from formats.files.padded_shapes import padded_shapes
from formats.files.tensor_entry import StatedShape, TensorEntry

# An index or a header of 100,000 tensors has 10 MB; larger ones cost seconds and memory.
MAX_HEADER_BYTES = 25_000_000
LFS_POINTER = b"version https://git-lfs"  # start of what git checks out without LFS
MAX_DIMS = 8
MAX_EXTENT = 2**48
# safetensors dtype -> (torch dtype, bits)
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; refuse duplicate keys, of which json would keep only the last one."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key appears twice")
    return found


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Return the tensors that a safetensors header declares, checked against the file's size.

    Layout: 8 bytes header length (little-endian), the JSON header, the data, without gaps.
    """
    try:
        size = size_of_file(path)
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, max_bytes):
                if (start + file.read(len(LFS_POINTER))).startswith(LFS_POINTER):
                    remedy = "run `git lfs pull` in the folder"
                    raise CheckpointError(str(path), "is only a pointer of Git LFS", remedy)
                raise CheckpointError(
                    str(path), "is not a safetensors file, or is truncated", "download it again"
                )
            text = file.read(length)
            header = json.loads(text, parse_int=parse_int, object_pairs_hook=_without_duplicates)
        if not isinstance(header, dict):
            raise TypeError(f"expected a JSON object, found {type(header).__name__}")
        entries, spans = {}, []
        for name, item in header.items():
            if name == "__metadata__":
                continue
            if not name.isprintable():  # a lone surrogate or a terminal escape code
                raise ValueError(f"{name!r:.100} is not a valid tensor name")
            if item["dtype"] not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name}",
                    f"expected one of the dtypes {', '.join(DTYPES)}, found {item['dtype']!r:.40}",
                    "save the tensor in one of them",
                )
            dtype, shape = DTYPES[item["dtype"]], tuple(item["shape"])
            begin, end = item["data_offsets"]
            if not all(type(number) is int for number in (*shape, begin, end)):
                raise TypeError(f"{name} has a shape or an offset that is not a whole number")
            if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_EXTENT:
                raise ValueError(f"{name} has a shape larger than any tensor")
            count = 1
            for extent in shape:
                count *= extent
            if min(shape, default=0) < 0 or begin < 0 or end - begin != count * dtype.itemsize:
                raise CheckpointError(
                    f"{path}: {name}",
                    f"{end - begin} bytes do not hold {list(shape)} {dtype}",
                    DOWNLOAD_AGAIN,
                )
            if 8 + length + end > size:
                raise CheckpointError(
                    str(path),
                    f"truncated: {name} ends at byte {8 + length + end}, the file has {size}",
                    "download it again",
                )
            entries[name] = TensorEntry(
                name=name,
                dtype=dtype,
                shape=shape,
                num_bytes=end - begin,
                file=path,
                offset=8 + length + begin,
            )
            spans.append((begin, end))
        for name, values in padded_shapes(header.get("__metadata__"), entries).items():
            entries[name] = StatedShape(
                name=name,
                dtype=torch.int64,
                shape=(len(values),),
                num_bytes=0,
                file=path,
                offset=0,
                values=values,
            )
        position = 0
        for begin, end in sorted(spans):
            if begin != position:
                raise ValueError(f"tensors overlap or leave a gap at byte {position} of the data")
            position = end
        if 8 + length + position != size:
            raise ValueError(f"{size - 8 - length - position} bytes belong to no tensor")
    except FileNotFoundError:
        raise CheckpointError(str(path), "not found", "download the checkpoint again") from None
    except OSError as error:
        raise CheckpointError(
            str(path), f"cannot be read: {error.strerror}", CHECK_ACCESS
        ) from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            str(path), f"its safetensors header is damaged: {error}", DOWNLOAD_AGAIN
        ) from None
    return entries
