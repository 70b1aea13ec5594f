"""GPTQ tensors <-> PackedWeight, on the local names of one linear. Byte layout: formats/README.md.

Only this module knows the v1 rule "the file stores the zero point minus one". Legend: N outputs, K
inputs, G groups, b bits.
"""

from dataclasses import replace
from typing import Literal

import torch

from formats.codecs.group_order import order_of_groups
from formats.errors import CheckpointError, tensor_error
from formats.in_memory.packed import PackedWeight
from formats.numerics.bits import pack, packed_length, unpack
from formats.scheme import CHANNEL, QuantSpec

TENSOR_NAMES = ("qweight", "qzeros", "scales", "g_idx")
Zeros = Literal["v1", "v2"]  # stored: the zero point minus one, or the zero point


def zeros_rule(spec: QuantSpec) -> Zeros:
    """Return the zeros version to write.

    It is v1, which all readers expect, or v2 if a zero point may be 0.
    """
    return "v1" if spec.symmetric else "v2"


def encode(
    packed: PackedWeight, name: str = "weight", zeros: Zeros | None = None
) -> dict[str, torch.Tensor]:
    """Return one linear's GPTQ tensors. Raises CheckpointError if v1 cannot store a zero."""
    spec, in_features = packed.spec, packed.in_features
    stored_NG = packed.zeros_NG
    if (zeros or zeros_rule(spec)) == "v1":
        if (stored_NG == 0).any():
            raise CheckpointError(
                name,
                "a zero point of 0 cannot be stored in GPTQ v1, which stores the zero point minus"
                " one",
                "use a symmetric scheme, or v2 zeros",
            )
        stored_NG = stored_NG - 1
    groups = torch.arange(in_features, dtype=torch.int32, device=packed.device)
    groups //= spec.group_length(in_features)
    words_NW = packed.words_NW
    if packed.input_order is not None:
        codes = packed.codes()
        codes = torch.empty_like(codes).index_copy_(1, packed.input_order, codes)
        words_NW = pack(codes, spec.bits)
        groups = torch.empty_like(groups).index_copy_(0, packed.input_order, groups)
    return {
        "qweight": words_NW.t().contiguous(),
        "qzeros": pack(stored_NG.t(), spec.bits),
        "scales": packed.scales_NG.t().contiguous(),
        "g_idx": groups,
    }


def decode(
    tensors: dict[str, torch.Tensor],
    spec: QuantSpec,
    name: str = "weight",
    zeros: Zeros | None = None,
) -> PackedWeight:
    """Decode one linear's GPTQ tensors, in any order of inputs. Raises CheckpointError.

    `zeros` is the version in the checkpoint's label; None: the one that `encode` writes. `g_idx`
    may be absent.
    """
    in_features, out_features = _check_shapes(tensors, spec, name)
    scales_GN = tensors["scales"]
    stored_GN = unpack(tensors["qzeros"], spec.bits)[:, :out_features]
    version = stored_version(stored_GN, spec, zeros or zeros_rule(spec), name)
    if version == "v1":
        stored_GN = (stored_GN + 1) & spec.max_code
    g_idx = tensors.get("g_idx")
    words_NW, order = tensors["qweight"].t(), None
    length = spec.group_length(in_features)
    if g_idx is None and in_features % length:
        g_idx = torch.arange(in_features, device=scales_GN.device) // length
    if g_idx is not None:
        if g_idx.shape != (in_features,):
            raise tensor_error(
                f"{name}.g_idx", f"expected [{in_features}], found {list(g_idx.shape)}"
            )
        order, source, run = order_of_groups(g_idx, scales_GN.shape[0], name)
        if source is not None:
            scales_GN, stored_GN = scales_GN[source], stored_GN[source]
        if run != length:
            spec = replace(spec, group_size=CHANNEL if run == in_features else run)
        if order is not None:
            words_NW = pack(unpack(words_NW, spec.bits)[:, order], spec.bits)
    packed = PackedWeight(
        words_NW=words_NW.contiguous(),
        scales_NG=scales_GN.t().contiguous(),
        zeros_NG=stored_GN.t().contiguous(),
        spec=spec,
        in_features=in_features,
        input_order=order,
    )
    packed.check(name)
    return packed


def stored_version(
    stored_GN: torch.Tensor, spec: QuantSpec, label: Zeros, name: str = "weight"
) -> Zeros:
    """Return the version of the stored zeros. Raises CheckpointError if it is ambiguous.

    Symmetric zeros show their version, whatever the label says. Asymmetric ones follow the label,
    unless they contain a value that writers use with different meanings.
    """
    middle = spec.symmetric_zero
    low, high = int(stored_GN.min()), int(stored_GN.max())
    if spec.symmetric:
        if low == high and low in (middle - 1, middle):
            return "v1" if low == middle - 1 else "v2"
        raise CheckpointError(
            f"{name}.qzeros",
            f"expected only {middle - 1} (v1) or only {middle} (v2) in a symmetric scheme, found"
            f" {stored_GN.unique().tolist()[:8]}",
            "set sym to false if these zeros are intended",
        )
    if low == high == (middle if label == "v1" else middle - 1):
        raise CheckpointError(
            f"{name}.qzeros",
            f"contains only {low}, and the label is {label}: either these are symmetric zeros of"
            " the other version, or the label is right and the zeros are unusual",
            "set sym to true if the model is symmetric, otherwise checkpoint_format to its version",
        )
    if label == "v1" and high == spec.max_code:
        raise CheckpointError(
            f"{name}.qzeros",
            f"contains {high}, and the label is v1: either a zero point of 0 overflowed, possibly"
            " into neighbouring codes, or these are v2 zeros; the file does not say which",
            "write the checkpoint again with gptq_v2 zeros",
        )
    return label


def _check_shapes(tensors: dict[str, torch.Tensor], spec: QuantSpec, name: str) -> tuple[int, int]:
    """Return (K, N). Raises CheckpointError if the tensors do not fit each other or the spec."""
    missing = {"qweight", "qzeros", "scales"} - tensors.keys()
    if missing:
        raise tensor_error(name, f"tensors missing: {', '.join(sorted(missing))}")
    for field in ("qweight", "qzeros"):
        if tensors[field].dtype != torch.int32 or tensors[field].ndim != 2:
            raise tensor_error(
                f"{name}.{field}",
                f"expected a 2-d int32 tensor, found {tensors[field].dtype}"
                f" {list(tensors[field].shape)}",
            )
    words, out_features = tensors["qweight"].shape
    in_features = words * 32 // spec.bits
    if not words or not out_features or words * 32 % spec.bits:
        raise tensor_error(f"{name}.qweight", f"found {[words, out_features]}")
    packed_length(in_features, spec.bits)
    num_groups = -(-in_features // spec.group_length(in_features))
    shapes = {
        "qzeros": (num_groups, -(-out_features * spec.bits // 32)),
        "scales": (num_groups, out_features),
    }
    for field, shape in shapes.items():
        if tensors[field].shape != shape:
            raise tensor_error(
                f"{name}.{field}",
                f"expected {list(shape)} for {spec.bits} bits in groups of {spec.group_size},"
                f" found {list(tensors[field].shape)}",
            )
    return in_features, out_features


def is_mislabelled(tensors: dict[str, torch.Tensor], spec: QuantSpec, label: Zeros) -> bool:
    """Return True if decoded symmetric zeros show another version than the label."""
    if not spec.symmetric:
        return False
    first = int(tensors["qzeros"].flatten()[0]) & spec.max_code
    return (first == spec.symmetric_zero - 1) != (label == "v1")
