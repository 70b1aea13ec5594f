"""HQQ's tensors -> weights, on the local names of one linear. See formats/README.md.

W = (code - zero) * scale with non-integer zero points. Weights are therefore read as floats,
computed in the dtype of the scales as HQQ does. A linear's settings are also stored as tensors.
Legend: N outputs, K inputs.
"""

import torch

from formats.errors import (
    DOWNLOAD_BOTH,
    QUANTIZE_FLOAT,
    CheckpointError,
    tensor_error,
    unsupported_error,
)
from formats.in_memory.dense import DenseWeight
from formats.scheme import QuantSpec

CODES = "W_q"
# settings: numbers and texts, each stored as a tensor
VIEWED = "view_as_float"  # codes are stored under a float dtype
SETTINGS = ("nbits", "group_size", "axis", "shape", "packing", VIEWED)
UNUSED = (
    *("unpack_view_dtype", "compute_dtype", "quant_scale", "quant_zero", "offload_meta"),
    *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero"),
)
FIELDS = (CODES, "scale", "zero", *SETTINGS, *UNUSED)
# bits -> (codes per word, dtype of a word). Rows are split into as many parts as a word has codes.
# A word holds a code of each part, the first part's in the highest bits.
PACKED = {8: (1, torch.uint8), 4: (2, torch.uint8), 3: (10, torch.int32), 2: (4, torch.uint8)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def decode(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> DenseWeight:
    """Decode the weight in the dtype of its scales. Raises CheckpointError."""
    for field in (CODES, "scale", "zero", "shape", "axis", "nbits"):
        if field not in tensors:
            remedy = DOWNLOAD_BOTH
            if field in ("scale", "zero"):
                remedy = f"{QUANTIZE_FLOAT}: quantized scales are not supported"
            raise CheckpointError(f"{name}.{field}", "is missing", remedy)
    bits, axis = (_number(tensors[field], f"{name}.{field}") for field in ("nbits", "axis"))
    if bits != spec.bits:
        raise tensor_error(f"{name}.nbits", f"config.json states {spec.bits}, found {bits}")
    if axis not in (0, 1):
        raise tensor_error(f"{name}.axis", f"expected 0 or 1, found {axis}")
    shape = tensors["shape"].flatten().tolist()
    if len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
        raise tensor_error(f"{name}.shape", f"expected N and K, found {shape[:4]}")
    N, K = shape
    scale, zero = tensors["scale"], tensors["zero"]
    length = spec.group_length(N if axis == 0 and spec.group_size < 0 else K)
    if N * K % length:
        raise tensor_error(name, f"{N * K} weights are not divisible by the group size {length}")
    groups = N * K // length
    wanted = (1, groups) if axis == 0 else (groups, 1)
    for field, part in (("scale", scale), ("zero", zero)):
        if part.shape != wanted or part.dtype not in DTYPES:
            raise tensor_error(
                f"{name}.{field}",
                f"expected floats {list(wanted)}, found {part.dtype} {list(part.shape)}",
            )
    rows = length if axis == 0 else groups
    viewed = VIEWED in tensors and _number(tensors[VIEWED], f"{name}.{VIEWED}") != 0
    codes = _codes(tensors[CODES], bits, rows, N * K // rows, f"{name}.{CODES}", viewed=viewed)
    codes = codes.to(scale.dtype)
    weight = DenseWeight(weight_NK=((codes - zero) * scale).reshape(N, K), spec=spec)
    weight.check(name)
    return weight


def _number(tensor: torch.Tensor, name: str) -> int:
    if tensor.numel() != 1 or tensor.is_floating_point():
        raise tensor_error(name, f"expected one number, found {tensor.dtype} {tensor.shape}")
    return int(tensor)


def _codes(
    words: torch.Tensor, bits: int, rows: int, columns: int, name: str, *, viewed: bool
) -> torch.Tensor:
    """Unpack to uint8 [rows, columns]; if `viewed`, the words are stored as another dtype."""
    if bits not in PACKED:
        raise unsupported_error(name, f"{bits} bits: supported are {', '.join(map(str, PACKED))}")
    per_word, dtype = PACKED[bits]
    packed_rows = -(-rows // per_word)
    if not viewed and (words.dtype, words.shape) != (dtype, (packed_rows, columns)):
        raise tensor_error(
            name,
            f"expected {dtype} {[packed_rows, columns]} for {rows} x {columns} codes of {bits}"
            f" bits, found {words.dtype} {list(words.shape)}",
        )
    data = words.contiguous().flatten().view(torch.uint8)
    if data.numel() != packed_rows * columns * dtype.itemsize:
        raise tensor_error(
            name,
            f"expected {packed_rows * columns * dtype.itemsize} bytes for {rows} x {columns} codes"
            f" of {bits} bits, found {data.numel()}",
        )
    packed = data.view(dtype).view(packed_rows, columns)
    parts = [packed >> (bits * (per_word - 1 - i)) & (2**bits - 1) for i in range(per_word)]
    return torch.cat(parts).to(torch.uint8)[:rows]
