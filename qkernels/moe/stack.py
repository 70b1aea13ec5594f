"""Stack the weights of all experts into one: the outputs of expert e + 1 follow those of e.

Rows of gate and up alternate, eight of gate and eight of up. In a tensor core fragment of sixteen
rows, a thread holds rows r and r + 8, so it has a gate and the matching up.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from formats.errors import CheckpointError
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.fp8 import Fp8Weight, block_size
from formats.in_memory.k_weight import KWeight
from formats.in_memory.packed import PackedWeight
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import Weight, merge
from formats.scheme import QuantSpec
from qkernels import dispatch
from qkernels.linear.rows import LINEAR
from qkernels.moe.experts import (
    ExpertMatrix,
    ExpertStack,
    ExpertWeights,
    is_packed,
    shape_of,
    spec_of,
)
from qkernels.w4a8 import layout as w4a8
from qkernels.w4a8.prepack import prepacked_tensors
from qkernels.wna16.layout import kernel_bits, refuses_stack

PAIR_ROWS = 8  # rows of gate, followed by as many rows of up
CODES_AT_ONCE = 2**27  # codes that are prepacked together; each takes about 12 bytes meanwhile
SCALE_INPUTS = 128  # inputs that share a scale of a block-scaled float8 weight


def glu_order(inner: int, device: torch.device) -> torch.Tensor:
    """Return the row order of the stack: its row r is row order[r] of [gate; up]."""
    rows = torch.arange(2 * inner, device=device).view(2, -1, PAIR_ROWS)
    return rows.transpose(0, 1).flatten()


def stack_fault(matrices: Sequence[ExpertMatrix]) -> str | None:
    """Return why these matrices cannot be stacked; None: they can."""
    first = matrices[0]
    for matrix in matrices:
        if shape_of(matrix) != shape_of(first) or _numerics(matrix) != _numerics(first):
            return "its experts differ in shape or numerics"
        if isinstance(matrix, torch.Tensor):
            continue
        if matrix.input_order is not None:
            return "its experts sort their inputs, possibly in different orders"
        if matrix.input_scale is not None and not torch.equal(
            matrix.input_scale, first.input_scale
        ):
            return "its experts have different static input scales"
    return None


def products_fault(weights: ExpertWeights) -> str | None:
    """Return why one kernel cannot run both products of these experts; None: it can."""
    gate_up, down = weights.gate_up[0], weights.down[0]
    if products_alike(weights):
        return None
    if not (_is_weight_only(gate_up) and _is_weight_only(down)):
        return "its two products differ in kind"
    return refuses_stack(gate_up.spec, [gate_up.in_features])


def _is_weight_only(matrix: ExpertMatrix) -> bool:
    """Return True for packed weights with 16-bit inputs."""
    return is_packed(matrix) and matrix.activation is None


def products_alike(weights: ExpertWeights) -> bool:
    """Return True if both products have the same quantization, up to bits (stack_bits)."""
    return _numerics(weights.gate_up[0]) == _numerics(weights.down[0])


def stack_bits(weights: ExpertWeights) -> int | None:
    """Return the bits of a code in the stacks: enough for every expert. None: not packed."""
    matrices = [*weights.gate_up, *weights.down]
    if not all(_has_bits(matrix) for matrix in matrices):
        return None
    return max(kernel_bits(matrix.spec.bits) for matrix in matrices)


def _has_bits(matrix: ExpertMatrix) -> bool:
    """Return True if the matrix can be stored with wider codes: PackedWeight.with_bits."""
    return isinstance(matrix, PackedWeight) and matrix.activation is None


def _numerics(matrix: ExpertMatrix) -> tuple[object, ...]:
    """Return what matrices of one stack have in common."""
    spec = spec_of(matrix)
    if _has_bits(matrix):
        spec = replace(spec, bits=8)
    return type(matrix), spec, getattr(matrix, "activation", None)


def stack(
    matrices: Sequence[ExpertMatrix],
    *,
    dtype: torch.dtype,
    device: torch.device,
    gated: bool,
    bits: int | None,
    bias_EN: torch.Tensor | None,
) -> ExpertStack:
    """Stack the experts' matrices.

    `gated`: each one has gate's rows, then up's. `bits`: stack_bits of both products.
    """
    N, K = shape_of(matrices[0])
    order = glu_order(N // 2, device) if gated else None
    if order is not None:
        bias_EN = None if bias_EN is None else bias_EN.to(device)[:, order]
    on_device = [_ordered(matrix.to(device), order) for matrix in matrices]
    activation, spec = None, spec_of(matrices[0])
    if isinstance(on_device[0], torch.Tensor):
        kind, tensors = "float", {"weight": torch.cat([m.to(dtype) for m in on_device])}
    else:
        activation = on_device[0].activation
        if _is_weight_only(on_device[0]):
            kind = "packed"
            tensors, spec = _prepacked(on_device, dtype, bits)
        elif isinstance(on_device[0], PackedWeight) and spec.bits == 4:
            kind, tensors = "w4a8", _prepacked_w4a8(on_device)
        else:
            kind, tensors = "codes", _codes(_merged(on_device))
    return ExpertStack(
        kind=kind,
        tensors=tensors,
        spec=spec,
        activation=activation,
        out_features=N,
        in_features=K,
        bias_EN=None if bias_EN is None else bias_EN.to(device, dtype).contiguous(),
    )


def _prepacked(
    matrices: Sequence[PackedWeight | KWeight | Fp4Weight], dtype: torch.dtype, bits: int | None
) -> tuple[dict[str, torch.Tensor], QuantSpec]:
    """Prepack the stack, a few experts at a time to limit memory. Returns (tensors, spec)."""
    module = dispatch.module_of(LINEAR, "w4a16")  # prepares weights of any bits
    specs = set()

    def prepack(few: Weight) -> dict[str, torch.Tensor]:
        prepared = module.prepare_weight(few, dtype)
        specs.add(prepared.spec)
        return prepared.tensors

    tensors = _together(matrices, prepack, bits)
    (spec,) = specs
    return tensors, spec


def _prepacked_w4a8(matrices: Sequence[PackedWeight]) -> dict[str, torch.Tensor]:
    """Prepack the stack for W4A8, with the inputs' static scale if there is one."""
    first = matrices[0]
    block_k = w4a8.k_step(first.spec.group_length(first.in_features))
    tensors = _together(matrices, lambda few: prepacked_tensors(few, block_k))
    if first.input_scale is not None:
        tensors["input_scale"] = first.input_scale
    return tensors


def _together(
    matrices: Sequence[Weight],
    prepack: Callable[[Weight], dict[str, torch.Tensor]],
    bits: int | None = None,
) -> dict[str, torch.Tensor]:
    """Prepack a few matrices at a time and concatenate the results by rows.

    `bits`: first store their codes in so many bits.
    """
    N, K = shape_of(matrices[0])
    at_once = max(1, CODES_AT_ONCE // (N * K))
    parts = []
    for first in range(0, len(matrices), at_once):
        few = matrices[first : first + at_once]
        if bits is not None:
            few = [matrix.with_bits(bits) for matrix in few]
        parts.append(prepack(_merged(few)))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _merged(matrices: Sequence[Weight]) -> Weight:
    return merge(list(matrices), "experts") if len(matrices) > 1 else matrices[0]


def _codes(weight: Weight) -> dict[str, torch.Tensor]:
    """Return signed codes [N, K] and float32 scales [N] or [N, K / 128]."""
    if isinstance(weight, Fp8Weight):
        codes_NK, scales = weight.codes_NK, weight.scales_RC
        scales = scales.expand(codes_NK.shape[0], -1) if len(scales) == 1 else scales
    else:
        codes_NK = (weight.codes().to(torch.int16) - weight.spec.symmetric_zero).to(torch.int8)
        scales = weight.scales_NG
    scales = scales.float()
    tensors = {
        "codes": codes_NK.contiguous(),
        "scales": (scales[:, 0] if scales.shape[1] == 1 else scales).contiguous(),
    }
    if weight.input_scale is not None:
        tensors["input_scale"] = weight.input_scale
    return tensors


def _ordered(matrix: ExpertMatrix, order: torch.Tensor | None) -> ExpertMatrix:
    """Reorder the rows of a matrix; block-scaled float8 gets one scale per row."""
    if isinstance(matrix, Fp8Weight):
        matrix = _with_scales_of_rows(matrix)
    if order is None:
        return matrix
    if isinstance(matrix, torch.Tensor):
        return matrix[order]
    return take_outputs(matrix, order)


def _with_scales_of_rows(weight: Fp8Weight) -> Fp8Weight:
    rows, inputs = block_size(weight.spec, *weight.codes_NK.shape)
    if inputs not in (weight.in_features, SCALE_INPUTS):
        raise CheckpointError(
            "FP8 experts",
            f"expected a scale for {SCALE_INPUTS} inputs or for all, found one for {inputs}",
            "quantize the float model with the scheme w8a8-fp8-block",
        )
    scales_NC = weight.scales_RC.repeat_interleave(rows, 0)[: weight.out_features]
    return replace(weight, scales_RC=scales_NC, spec=replace(weight.spec, rows=1))
