"""torchao's tensors, as it flattens them into safetensors -> weights. See formats/README.md.

The configuration states a linear's tensor class. Each component is a separate tensor below the
linear, such as _weight_qdata. Legend: N outputs, K inputs, G groups of L inputs.
"""

from dataclasses import replace

import torch

from formats.errors import QUANTIZE_FLOAT, CheckpointError, tensor_error, unsupported_error
from formats.files.padded_shapes import PADDED_FIELD, SHAPE_FIELD
from formats.in_memory.dense import DenseWeight
from formats.in_memory.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.in_memory.packed import SCALE_DTYPES, PackedWeight
from formats.in_memory.weights import Weight, with_activation
from formats.scheme import QuantSpec, Scheme

DATA, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
# only for int4 tiles: scales and zeros in one tensor, and the shape without padding
SCALE_AND_ZERO, SHAPE = PADDED_FIELD, SHAPE_FIELD
# unsupported components: they mean another layout or scaled inputs
OTHERS = {
    "_weight_act_pre_scale": "its inputs are multiplied by act_pre_scale, which is not supported",
    "_weight_per_tensor_scale": "has a scale of the whole tensor (NVFP4)",
}
# torchao pads to multiples of these
N_PADDING, K_PADDING = 8, 1024
MARKERS = (DATA, SCALE, SCALE_AND_ZERO)
FIELDS = (DATA, SCALE, ZERO, SCALE_AND_ZERO, SHAPE, *OTHERS)


def decode(tensors: dict[str, torch.Tensor], scheme: Scheme, name: str) -> Weight:
    """Decode a linear: int8 codes and float8 numbers unchanged, int4 with float zeros to floats.

    Raises CheckpointError.
    """
    for field, problem in OTHERS.items():
        if field in tensors:
            raise CheckpointError(f"{name}.{field}", problem, QUANTIZE_FLOAT)
    spec = scheme.weight
    if spec.type == "floatzero" and SCALE_AND_ZERO in tensors:
        return _decode_tiles(tensors, spec, name)
    for field in (DATA, SCALE, *([ZERO] if spec.type == "floatzero" else [])):
        if field not in tensors:
            raise tensor_error(f"{name}.{field}", "is missing")
    if tensors[SCALE].dtype not in SCALE_DTYPES:
        raise tensor_error(f"{name}.{SCALE}", f"expected floats, found {tensors[SCALE].dtype}")
    if spec.type == "floatzero":
        return _decode_int4(tensors, spec, name)
    decoded = _decode_float8 if spec.type == "float" else _decode_integers
    weight = replace(decoded(tensors, spec, name), activation=scheme.activation)
    return with_activation(weight, scheme, None, name)


def _decode_float8(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> Fp8Weight:
    codes_NK = _matrix(tensors[DATA], FP8_DTYPE, f"{name}.{DATA}")
    wanted, scales = scales_shape(spec, *codes_NK.shape), tensors[SCALE]
    if scales.numel() != wanted[0] * wanted[1]:
        raise tensor_error(
            f"{name}.{SCALE}", f"expected {list(wanted)}, found {list(scales.shape)}"
        )
    return Fp8Weight(codes_NK=codes_NK, scales_RC=scales.reshape(wanted), spec=spec)


def _decode_integers(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> PackedWeight:
    """Decode signed codes of `spec.bits`, one per byte; missing zero points are all 0."""
    signed_NK = _matrix(tensors[DATA], torch.int8, f"{name}.{DATA}")
    N, K = signed_NK.shape
    scales_NG = tensors[SCALE]
    num_groups = spec.num_groups(K) if K % spec.group_length(K) == 0 else 0
    if scales_NG.shape != (N, num_groups):
        raise tensor_error(
            f"{name}.{SCALE}",
            f"expected {[N, num_groups]} in groups of {spec.group_length(K)},"
            f" found {list(scales_NG.shape)}",
        )
    zeros_NG = tensors.get(ZERO)
    if zeros_NG is None:
        zeros_NG = torch.zeros(N, num_groups, dtype=torch.int8)
    if zeros_NG.is_floating_point() and not bool((zeros_NG == zeros_NG.round()).all()):
        raise unsupported_error(f"{name}.{ZERO}", "expected whole numbers, found floats")
    if zeros_NG.shape != scales_NG.shape:
        raise tensor_error(
            f"{name}.{ZERO}", f"expected {list(scales_NG.shape)}, found {list(zeros_NG.shape)}"
        )
    middle = spec.symmetric_zero
    return PackedWeight.from_codes(
        signed_NK.to(torch.int16) + middle,
        scales_NG,
        zeros_NG.to(torch.int16) + middle,
        spec,
        name,
    )


def _decode_int4(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> DenseWeight:
    """Decode W = scale * code + zero, codes -8 to 7, even inputs in the low half of a byte.

    Scales and zero points are [G, N].
    """
    data = tensors[DATA]
    if data.dtype not in (torch.int8, torch.uint8) or data.ndim != 2:
        raise CheckpointError(
            f"{name}.{DATA}",
            f"expected int8 [N, K / 2], found {data.dtype} {list(data.shape)}",
            "quantize the float model: only int4_packing_format plain and tile_packed_to_4d are"
            " read",
        )
    bytes_NB = data.contiguous().view(torch.uint8)
    unsigned = torch.stack([bytes_NB & 15, bytes_NB >> 4], -1).flatten(1)
    signed_NK = torch.where(unsigned > 7, unsigned.to(torch.int8) - 16, unsigned.to(torch.int8))
    (N, K), length = signed_NK.shape, spec.group_length(signed_NK.shape[1])
    num_groups = K // length if K % length == 0 else 0
    for field in (SCALE, ZERO):
        _check_floats(tensors[field], (num_groups, N), length, f"{name}.{field}")
    return _scaled(signed_NK, tensors[SCALE], tensors[ZERO], spec, name)


def _decode_tiles(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> DenseWeight:
    """Decode the codes of tile_packed_to_4d, continue as in `_decode_int4`, and remove padding."""
    if DATA not in tensors:
        raise tensor_error(f"{name}.{DATA}", "is missing")
    codes_NK = unpack_tiles(tensors[DATA], f"{name}.{DATA}")
    (N, K), length = codes_NK.shape, spec.group_length(codes_NK.shape[1])
    num_groups = K // length if K % length == 0 else 0
    both_GN2 = tensors[SCALE_AND_ZERO]
    _check_floats(both_GN2, (num_groups, N, 2), length, f"{name}.{SCALE_AND_ZERO}")
    shape = tensors[SHAPE].tolist() if SHAPE in tensors else [N, K]
    if len(shape) != 2 or not (N - N_PADDING < shape[0] <= N and K - K_PADDING < shape[1] <= K):
        raise CheckpointError(
            f"{name}.{DATA}", f"holds {[N, K]}, its metadata states {shape}", "download it again"
        )
    whole = _scaled(codes_NK - 8, both_GN2[..., 0], both_GN2[..., 1], spec, name)
    return replace(whole, weight_NK=whole.weight_NK[: shape[0], : shape[1]].contiguous())


def unpack_tiles(words: torch.Tensor, name: str) -> torch.Tensor:
    """Return codes int8 [N, K], 0 to 15, of int32 words [N / 8, K / 32W, 32, W].

    Lane t of a tile's 32 holds row t div 4. Nibble p of word w holds the input 32w + 8 (p mod 4) +
    2 (t mod 4) + p div 4 of its tile.
    """
    is_tiled = words.dtype == torch.int32 and words.ndim == 4 and words.numel()
    if not is_tiled or words.shape[2] != 32 or words.shape[3] not in (1, 2, 4):
        raise CheckpointError(
            name,
            f"expected int32 [N / 8, K / 32W, 32, W], found {words.dtype} {list(words.shape)}",
            QUANTIZE_FLOAT,
        )
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (words[..., None] >> shifts & 15).to(torch.int8)
    rows, tiles, _, per_lane, _ = nibbles.shape
    split = nibbles.view(rows, tiles, 8, 4, per_lane, 2, 4)  # t = (8, 4), p = (2, 4)
    return split.permute(0, 2, 1, 4, 6, 3, 5).reshape(8 * rows, 32 * per_lane * tiles)


def _check_floats(part: torch.Tensor, shape: tuple[int, ...], length: int, name: str) -> None:
    if part.shape != shape or part.dtype not in SCALE_DTYPES:
        raise tensor_error(
            name,
            f"expected floats {list(shape)} in groups of {length},"
            f" found {part.dtype} {list(part.shape)}",
        )


def _scaled(
    signed_NK: torch.Tensor,
    scales_GN: torch.Tensor,
    zeros_GN: torch.Tensor,
    spec: QuantSpec,
    name: str,
) -> DenseWeight:
    """Return W = scale * code + zero, rounded once to the dtype of the scales."""
    scales_NG1, zeros_NG1 = (part.t()[..., None].float() for part in (scales_GN, zeros_GN))
    groups_NGL = signed_NK.float().unflatten(1, (scales_GN.shape[0], -1))
    weight_NK = groups_NGL.mul_(scales_NG1).add_(zeros_NG1).flatten(1)
    weight = DenseWeight(weight_NK=weight_NK.to(scales_GN.dtype), spec=spec)
    weight.check(name)
    return weight


def _matrix(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if tensor.dtype != dtype or tensor.ndim != 2 or not tensor.numel():
        raise tensor_error(
            name, f"expected {dtype} [N, K], found {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor
