"""bitsandbytes' tensors -> weights, on the local names of one linear. See formats/README.md.

4 bits: a code selects one of 16 table values, which is multiplied by the largest magnitude (absmax)
of its block. Blocks run over the flattened weight. With double quantization, absmax itself is
stored as codes of a second table. 8 bits: int8 codes with a scale for each output. Legend: N
outputs, K inputs, B blocks.
"""

import json
import math
from typing import Any

import torch

from formats.errors import CheckpointError, tensor_error
from formats.in_memory.dense import DenseWeight
from formats.in_memory.packed import PackedWeight
from formats.scheme import CHANNEL, QuantSpec

TABLES = ("nf4", "fp4")
STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in TABLES}
FOUR_BIT_FIELDS = (
    "weight",
    "weight.absmax",
    "weight.quant_map",
    "weight.nested_absmax",
    "weight.nested_quant_map",
    *STATES.values(),
)
EIGHT_BIT_FIELDS = ("weight", "SCB", "weight_format")
INT8_STEPS = 127  # code of the largest magnitude
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_STATE_BYTES = 10_000


def decode_4bit(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> DenseWeight:
    """Decode the weight in the dtype that the quantization state names. Raises CheckpointError."""
    state_field = STATES.get(spec.type, "")
    for field in ("weight", "weight.absmax", "weight.quant_map", state_field):
        if field not in tensors:
            raise tensor_error(f"{name}.{field}", "is missing")
    state = _state(tensors[state_field], spec.type, f"{name}.{state_field}")
    N, K = state["shape"]
    codes = _nibbles(tensors["weight"], N * K, f"{name}.weight")
    num_blocks = -(-N * K // state["blocksize"])
    absmax_B = _absmax(tensors, state, num_blocks, name)
    table = _table(tensors["weight.quant_map"], 16, f"{name}.weight.quant_map")
    numbers = torch.nn.functional.pad(table[codes.int()], (0, -N * K % state["blocksize"]))
    scaled = numbers.view(num_blocks, -1).mul_(absmax_B[:, None]).flatten()[: N * K]
    weight = DenseWeight(weight_NK=scaled.view(N, K).to(DTYPES[state["dtype"]]), spec=spec)
    weight.check(name)
    return weight


def decode_8bit(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> PackedWeight:
    """Decode symmetric codes with a scale for each output, SCB / 127. Raises CheckpointError."""
    for field in ("weight", "SCB"):
        if field not in tensors:
            raise tensor_error(f"{name}.{field}", "is missing")
    codes_NK, largest = tensors["weight"], tensors["SCB"]
    if codes_NK.dtype != torch.int8 or codes_NK.ndim != 2:
        raise tensor_error(
            f"{name}.weight", f"expected int8 [N, K], found {codes_NK.dtype} {list(codes_NK.shape)}"
        )
    if largest.dtype != torch.float32 or largest.numel() != codes_NK.shape[0]:
        raise tensor_error(
            f"{name}.SCB",
            f"expected float32 [{codes_NK.shape[0]}], found {largest.dtype} {list(largest.shape)}",
        )
    layout = tensors.get("weight_format")
    if layout is not None and (layout.numel() != 1 or int(layout) != 0):
        raise CheckpointError(
            f"{name}.weight_format",
            f"expected 0 (rows), found {layout.flatten().tolist()[:4]}",
            "save the model again with a current bitsandbytes",
        )
    scales_N1 = largest.reshape(-1, 1) / torch.full_like(largest.reshape(-1, 1), INT8_STEPS)
    # a row of zeros has magnitude 0; it gets scale 1 here
    scales_N1 = torch.where(largest.reshape(-1, 1) == 0, 1.0, scales_N1)
    unsigned = codes_NK.to(torch.int16) + spec.symmetric_zero
    return PackedWeight.from_codes(unsigned, scales_N1, None, spec, name)


def four_bit_spec(kind: str) -> QuantSpec:
    """Return the numerics that config.json states, with blocks of 64 weights."""
    return QuantSpec(bits=4, symmetric=True, group_size=64, type=kind)


EIGHT_BIT_SPEC = QuantSpec(bits=8, symmetric=True, group_size=CHANNEL)


def _state(tensor: torch.Tensor, kind: str, name: str) -> dict[str, Any]:
    """Return the checked JSON object that a byte tensor holds."""
    try:
        if tensor.dtype != torch.uint8 or tensor.ndim != 1 or tensor.numel() > MAX_STATE_BYTES:
            raise ValueError(f"found {tensor.dtype} {list(tensor.shape)}")
        state = json.loads(bytes(tensor.tolist()).decode())
        if not isinstance(state, dict):
            raise ValueError(f"found a JSON {type(state).__name__}")
    except (ValueError, RecursionError) as error:
        raise tensor_error(name, f"is not a JSON object as bytes: {error}"[:200]) from None
    shape, size = state.get("shape"), state.get("blocksize")
    wanted = {
        "quant_type": state.get("quant_type") == kind,
        "shape": isinstance(shape, list)
        and len(shape) == 2
        and all(type(extent) is int and 0 < extent < 2**31 for extent in shape),
        "blocksize": type(size) is int and 32 <= size <= 4096,
        "dtype": state.get("dtype") in DTYPES,
    }
    for key, is_right in wanted.items():
        if not is_right:
            raise tensor_error(name, f"its {key} cannot be {state.get(key)!r:.80}")
    return state


def _nibbles(words: torch.Tensor, count: int, name: str) -> torch.Tensor:
    """Unpack `count` codes from bytes stored in any dtype; the high half of a byte comes first."""
    data = words.contiguous().flatten().view(torch.uint8)
    if data.numel() != -(-count // 2):
        raise tensor_error(
            name, f"expected {-(-count // 2)} bytes for {count} codes, found {data.numel()}"
        )
    return torch.stack([data >> 4, data & 15], -1).flatten()[:count]


def _absmax(
    tensors: dict[str, torch.Tensor], state: dict[str, Any], num_blocks: int, name: str
) -> torch.Tensor:
    """Return the largest magnitude of each block, float32 [B]."""
    stored = tensors["weight.absmax"].flatten()
    if stored.numel() != num_blocks:
        raise tensor_error(
            f"{name}.weight.absmax", f"expected {num_blocks} blocks, found {stored.numel()}"
        )
    is_nested = "weight.nested_absmax" in tensors
    if is_nested != (stored.dtype == torch.uint8) or not (is_nested or stored.is_floating_point()):
        raise tensor_error(
            f"{name}.weight.absmax",
            f"expected bytes with nested_absmax, else floats, found {stored.dtype}",
        )
    if not is_nested:
        return stored.float()
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(size) is not int or not 32 <= size <= 4096:
        raise tensor_error(name, f"its nested_blocksize cannot be {size!r:.80}")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise tensor_error(name, f"its nested_offset cannot be {offset!r:.80}")
    field = "weight.nested_quant_map"
    if field not in tensors:
        raise tensor_error(f"{name}.{field}", "is missing")
    table = _table(tensors[field], 256, f"{name}.{field}")
    outer = tensors["weight.nested_absmax"].flatten()
    wanted = -(-num_blocks // size)
    if outer.numel() != wanted or not outer.is_floating_point():
        raise tensor_error(
            f"{name}.weight.nested_absmax",
            f"expected {wanted} floats, found {outer.dtype} {list(outer.shape)}",
        )
    spread = outer.float().repeat_interleave(size)[:num_blocks]
    return table[stored.int()] * spread + torch.tensor(offset, dtype=torch.float32).to(spread)


def _table(values: torch.Tensor, length: int, name: str) -> torch.Tensor:
    if values.numel() != length or not values.is_floating_point():
        raise tensor_error(
            name, f"expected {length} floats, found {values.dtype} {list(values.shape)}"
        )
    if not torch.isfinite(values).all():
        raise CheckpointError(name, "contains NaN or infinity", "download it again")
    return values.flatten().float()
