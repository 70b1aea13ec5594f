"""Convert GGUF blocks to the tensors that kernels run, without changing a code.

Symmetric blocks of 32 with a float16 scale become groups of a packed weight: 4-bit codes are kept,
values of 5 to 8 bits become 8-bit codes around 128. MXFP4 is the same format with another order of
nibbles. Names and shapes are those of compressed-tensors. Blocks with minima or quantized scales
(KWeight) are kept unchanged. Legend: N outputs, K inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from formats.errors import DOWNLOAD_AGAIN, CheckpointError
from formats.gguf.block_types import BlockType
from formats.gguf.blocks import iq4_values, nibbles, q5_codes
from formats.numerics.bits import pack
from formats.scheme import BLOCK_TYPES, QuantSpec, Scheme, block_scheme

GROUP = 32  # elements per block, in all types that become CODES and SCALES
CODES, SCALES = "weight_packed", "weight_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """The tensors that hold the blocks of a type for kernels."""

    scheme: Scheme
    codes_dtype: torch.dtype = torch.uint8
    codes_per_item: int = 1  # codes in an element of the codes tensor
    scales_dtype: torch.dtype | None = None  # None: one tensor holds the unchanged blocks
    outputs: int = 1  # kernels take multiples of this; other linears are read as floats

    @property
    def in_blocks(self) -> bool:
        return self.scales_dtype is None

    def runs(self, out_features: int) -> bool:
        """Return True if a GPU kernel takes a linear with `out_features` outputs."""
        return out_features % self.outputs == 0


def _integers(bits: int) -> KernelForm:
    spec = QuantSpec(bits=bits, symmetric=True, group_size=GROUP)
    return KernelForm(
        scheme=Scheme(weight=spec),
        codes_dtype=torch.int32,
        codes_per_item=32 // bits,
        scales_dtype=torch.float16,
    )


KERNEL_FORMS = {
    "int4": _integers(4),
    "int8": _integers(8),
    "mxfp4": KernelForm(
        scheme=Scheme(
            weight=QuantSpec(bits=4, symmetric=True, group_size=GROUP, type="mxfp4"),
        ),
        codes_dtype=torch.uint8,
        codes_per_item=2,
        scales_dtype=torch.uint8,
    ),
    **{name: KernelForm(scheme=block_scheme(name), outputs=8) for name in BLOCK_TYPES},
}
# type -> function that returns the codes of blocks, unsigned with the middle code as zero point
_CODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": lambda data_BX: nibbles(data_BX[:, 2:]),
    "Q5_0": lambda data_BX: q5_codes(data_BX, 2) + 112,
    "Q8_0": lambda data_BX: data_BX[:, 2:] ^ 128,  # a signed byte plus 128
    "IQ4_NL": lambda data_BX: (iq4_values(nibbles(data_BX[:, 2:])) + 128).to(torch.uint8),
}


def form_of(kind: BlockType) -> KernelForm | None:
    """Return the form in which kernels run a type; None: no kernel runs it."""
    return KERNEL_FORMS.get(kind.kernel_form)


def codes_of(data: torch.Tensor, kind: BlockType, in_features: int) -> torch.Tensor:
    """Return the codes tensor of whole rows, given as bytes."""
    blocks_BX = data.reshape(-1, kind.num_bytes)
    if kind.name == "MXFP4":  # a byte holds neighbors, not elements 16 apart
        in_order = nibbles(blocks_BX[:, 1:])
        return (in_order[:, ::2] | in_order[:, 1::2] << 4).reshape(-1, in_features // 2)
    spec = KERNEL_FORMS[kind.kernel_form].scheme.weight
    codes_BL = _CODES[kind.name](blocks_BX)
    is_zero_B1 = _scale_bits(blocks_BX) == 0
    codes_BL = torch.where(is_zero_B1, spec.symmetric_zero, codes_BL.to(torch.int32))
    return pack(codes_BL.to(torch.uint8).reshape(-1, in_features), spec.bits)


def scales_of(data: torch.Tensor, kind: BlockType, in_features: int, name: str) -> torch.Tensor:
    """Return the scales [N, K / 32] of whole rows, given as bytes. A block of zeros gets scale 1.

    Raises CheckpointError, with `name`, on NaN and infinity.
    """
    blocks_BX = data.reshape(-1, kind.num_bytes)
    if kind.name == "MXFP4":
        return blocks_BX[:, 0].reshape(-1, in_features // GROUP).contiguous()
    scales_B1 = blocks_BX[:, :2].contiguous().view(torch.float16)
    if not torch.isfinite(scales_B1).all():
        raise CheckpointError(
            name, "the scales of its blocks contain NaN or infinity", DOWNLOAD_AGAIN
        )
    scales_B1 = torch.where(_scale_bits(blocks_BX) == 0, torch.ones_like(scales_B1), scales_B1)
    return scales_B1.reshape(-1, in_features // GROUP)


def _scale_bits(blocks_BX: torch.Tensor) -> torch.Tensor:
    """Return the scale's bits without its sign, [B, 1]: 0 for both zeros."""
    return blocks_BX[:, :2].contiguous().view(torch.int16) & 0x7FFF
