"""Prepacked layout of a weight: tiles and K steps, in plain Python.

Legend: N outputs, K inputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from formats.scheme import BLOCK_TYPES, FP4_TYPES, MIN_TYPES, QuantSpec, block_length
from qkernels.gpu.config import ceil_div
from qkernels.operands.limbs import K_STEP

# Outputs per stored tile: the rows of operand A of one wgmma.
TILE_N = 64
MIN_K_STEP = 32  # the four packed words of a row, one per lane, hold 32 inputs


def k_step(group: int) -> int:
    """Return the inputs of a K step: the largest power of two up to 128 that divides the group.

    A K step then lies within one group, so one scale per row multiplies its sums.
    """
    return min(K_STEP, group & -group)


def padded_n(N: int) -> int:
    """Return the number of stored outputs, in whole tiles."""
    return ceil_div(N, TILE_N) * TILE_N


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec(QuantSpec):
    """Prepacked weight in blocks of a GGUF file, with several groups in a K step.

        W[n, k] = d[n, block] · scale[n, group] · (code − zero) − dmin[n, block] · minimum[n, group]

    `group_size` is the K step. Asymmetric weights have minima and no zero; symmetric weights have a
    zero and no minima.
    """

    group: int  # inputs that share a scale and a minimum
    block: int = 0  # inputs that share d and dmin; 0: none, scales and minima are float16

    @property
    def groups(self) -> int:
        """Groups per K step."""
        return self.group_size // self.group

    @property
    def parts(self) -> int:
        """Numbers per group: 2 (scale and minimum), or 1 (scale)."""
        return 1 if self.symmetric else 2

    @property
    def steps_per_block(self) -> int:
        """K steps per block; 0 without d and dmin."""
        return self.block // self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Spec(GroupedSpec):
    """Prepacked weight in 4-bit floats, with one or several groups in a K step.

        W[n, k] = factor[n] · scale[n, group] · number[n, k]

    The last K step may be padded with zeros: then it is not full of inputs.
    """

    floats: str  # "mxfp4" or "nvfp4" (formats/in_memory/fp4.py)


def fp4_step(in_features: int) -> int:
    """Return the inputs of a K step of 4-bit floats.

    It is 128 if padding adds at most a sixteenth, otherwise less.
    """
    steps = (K_STEP, K_STEP // 2, MIN_K_STEP)
    wasted = [ceil_div(in_features, step) * step - in_features for step in steps]
    pairs = zip(steps, wasted, strict=True)
    return next((step for step, waste in pairs if 16 * waste <= in_features), steps[-1])


def fp4_spec(spec: QuantSpec, in_features: int) -> Fp4Spec:
    """Return the spec of the prepacked weight, for a spec of FP4_TYPES."""
    return Fp4Spec(
        bits=4,
        symmetric=True,
        group_size=fp4_step(in_features),
        group=FP4_TYPES[spec.type],
        floats=spec.type,
    )


def has_fp4(spec: QuantSpec) -> bool:
    """Return True for 4-bit floats, prepacked or not."""
    return isinstance(spec, Fp4Spec) or spec.type in FP4_TYPES


def is_in_groups(spec: QuantSpec) -> bool:
    """Return True for a prepacked weight whose K steps have several integer groups."""
    return isinstance(spec, GroupedSpec) and not isinstance(spec, Fp4Spec)


def grouped_spec(
    spec: QuantSpec, in_features: int, inputs: tuple[int, int] | None = None
) -> GroupedSpec:
    """Return the spec of the prepacked weight, for a spec of BLOCK_TYPES.

    `inputs` is KWeight.inputs. Codes of 5 and 6 bits are stored in 8 bits.
    """
    length = block_length(spec.type)
    if inputs is not None:  # a shard may cut blocks: d and dmin are repeated for their pieces
        length = math.gcd(length, *inputs)
    step = k_step(math.gcd(in_features, length if spec.type not in MIN_TYPES else in_features))
    return GroupedSpec(
        bits=kernel_bits(spec.bits),
        symmetric=spec.symmetric,
        group_size=step,
        group=BLOCK_TYPES[spec.type][2],
        block=0 if spec.type in MIN_TYPES else length,
    )


def kernel_bits(bits: int) -> int:
    """Return the bits in which kernels store a code: 4, or 8 for codes of 5 to 8 bits."""
    return 4 if bits <= 4 else 8


def kernel_spec(spec: QuantSpec, in_features: int) -> QuantSpec:
    """Return the spec of the prepacked weight.

    It is a GroupedSpec for BLOCK_TYPES, an Fp4Spec for FP4_TYPES, else `spec` with kernel_bits.
    """
    if spec.type in FP4_TYPES:
        return fp4_spec(spec, in_features)
    if spec.type in BLOCK_TYPES:
        return grouped_spec(spec, in_features)
    return replace(spec, bits=kernel_bits(spec.bits))


def refuses_stack(spec: QuantSpec, inputs: Sequence[int]) -> str | None:
    """Return why kernels cannot run experts with these numbers of inputs; None: they can."""
    if spec.type in FP4_TYPES:
        return None
    if spec.type not in ("int", *BLOCK_TYPES):
        return f"takes integer weights, GGUF blocks and 4-bit floats, not {spec}"
    for size in inputs:
        group = MIN_K_STEP if spec.type in BLOCK_TYPES else spec.group_length(size)
        if k_step(group) < MIN_K_STEP or size % group:
            return f"takes groups divisible by {MIN_K_STEP}, not {group} of {size}"
    return None


def groups_ptx(bits: int, is_float16: bool) -> str:
    """Return PTX that computes a word's weights: code times scale plus addend, rounded once.

    Operands: pairs of 16-bit weights $0 ..., in the order of the word's bits (four pairs of 4-bit
    codes, two of 8-bit codes), then the word, the scale and the addend, both float32. A code is
    converted to float32 exactly: to code 2^-133, whose factor is part of the scale, or for float16
    to 2^23 + code minus 2^23.
    """
    pairs = 16 // bits
    word, scale, addend = (f"${pairs + i}" for i in range(3))
    if is_float16:
        code, high, to = "0x455{}", "0x4B", "cvt.rn.f16x2.f32"
        exact = "add.rn.f32 {0}, {0}, 0fCB000000; "
    else:
        code, high, to = "0x4{}44", "0", "cvt.rn.bf16x2.f32"
        exact = ""
    lines = ["{ .reg .b32 l, h, b; .reg .f32 w0, w1;"]
    if bits == 4:  # bytes with the codes at bits 0 and 8, or 4 and 12
        lines.append(
            f"and.b32 l, {word}, 0x0F0F0F0F; shr.u32 h, {word}, 4; and.b32 h, h, 0x0F0F0F0F;"
        )
    for out in range(pairs):
        source = "lh"[out % 2] if bits == 4 else word
        byte = out // 2 if bits == 4 else out
        for half in range(2):
            w = f"w{half}"
            lines.append(
                f"prmt.b32 b, {source}, {high}, {code.format(byte + 2 * half)}; mov.b32 {w}, b;"
                f" {exact.format(w)}fma.rn.f32 {w}, {w}, {scale}, {addend};"
            )
        lines.append(f"{to} ${out}, w1, w0;")
    return " ".join(lines) + " }"
