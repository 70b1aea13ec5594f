"""The table of layouts: everything that reads or writes quantized linears goes through a row of it.

A row says how a weight becomes tensors and back, what the tensors are called, what its config block
is, and which schemes and shapes it cannot hold. Knows no model.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch

from formats import awq, awq_gemv, compressed_tensors, gptq
from formats.bits import code_multiple
from formats.checkpoint import TensorEntry
from formats.errors import CheckpointError, InputError, SchemeError
from formats.fp8 import FP8_DTYPE
from formats.names import KV_CACHES
from formats.quant_config import QuantConfig
from formats.scheme import CHANNEL, Scheme, w4a8_name
from formats.weights import Weight, with_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One format on disk. `name` is what a user types and what quant_method says."""

    name: str
    fields: tuple[str, ...]  # every tensor that a linear may have, but for its bias
    markers: tuple[str, ...]  # any of these shows that a linear is quantized
    encode: Callable[[Weight, str], dict[str, torch.Tensor]]
    decode: Callable[[dict[str, torch.Tensor], Scheme, QuantConfig, str], Weight]
    refuses: Callable[[Scheme], str | None]  # why a scheme cannot be written; None: it can
    refuses_shape: Callable[[Scheme, int, int], str | None]  # the same of [N, K]
    second_file: str | None = None  # a copy of the config block for old readers
    group_index: bool = False  # inputs of a group may stand apart (act-order)
    kv_scales: bool = False  # its config block has a place for those of an 8-bit KV cache
    # what some tensors are called in the file -> what `decode` calls them
    aliases: Mapping[str, str] = field(default_factory=dict)


def _decode_gptq(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    packed = gptq.decode(tensors, scheme.weight, name, config.zeros)
    _check_order(tensors.get("g_idx"), packed.in_features, scheme, config, f"{name}.g_idx")
    return replace(packed, activation=scheme.activation)


def _decode_awq(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return awq.decode(tensors, scheme.weight, name)


def _decode_compressed(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    if config.unrounded_inputs:
        tensors = {field: t for field, t in tensors.items() if not field.startswith("input_")}
    weight = compressed_tensors.decode(tensors, scheme, name)
    g_idx, in_features = tensors.get("weight_g_idx"), weight.in_features
    _check_order(g_idx, in_features, scheme, config, f"{name}.weight_g_idx")
    return weight


def _decode_gemv(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return awq_gemv.decode(tensors, scheme.weight, name)


def _check_order(
    g_idx: torch.Tensor | None, in_features: int, scheme: Scheme, config: QuantConfig, name: str
) -> None:
    """Raise CheckpointError where inputs are regrouped though the configuration says they are not.

    Some readers believe the index and others the configuration: one of the two is wrong.
    """
    if g_idx is None or config.act_order:
        return
    length = scheme.weight.group_length(in_features)
    in_order = torch.arange(in_features, device=g_idx.device) // length
    if not torch.equal(g_idx.long(), in_order):
        raise CheckpointError(
            name,
            "inputs are not grouped in order, and the configuration does not say so",
            "state desc_act (actorder) if the index is meant, or remove it",
        )


def _gptq_refuses(scheme: Scheme) -> str | None:
    spec, activation = scheme.weight, scheme.activation
    if spec.type != "int":
        return "stores integer codes, not floating point numbers"
    if spec.bits not in (2, 3, 4, 8):
        return f"has 2, 3, 4 or 8 bits, not {spec.bits}"
    if activation is None:
        return None
    if not activation.dynamic:
        return "has no place for a static activation scale"
    if (spec.bits, spec.symmetric, spec.group_size) != (8, True, CHANNEL):
        return "holds 8-bit activations only beside symmetric 8-bit weights per channel"
    return None


def _awq_refuses(scheme: Scheme) -> str | None:
    if scheme.weight.type != "int" or scheme.activation is not None or scheme.weight.bits != 4:
        return "holds 4-bit weights with 16-bit activations only"
    return None


def _compressed_refuses(scheme: Scheme) -> str | None:
    spec = scheme.weight
    if spec.type == "int" and spec.bits not in compressed_tensors.PACKED_BITS:
        return f"is written with 2 to 8 bits, not {spec.bits}"
    if w4a8_name(scheme) is not None:
        return None
    if spec.type == "int" and scheme.activation is not None:
        if (spec.bits, spec.symmetric, spec.group_size) != (8, True, CHANNEL):
            return "holds 8-bit activations only beside symmetric 8-bit weights per channel"
        if scheme.activation.type != "int":
            return "holds integer weights only beside integer activations"
    return None


def _needs_multiples(out_multiple: int, in_multiple: int) -> Callable[..., str | None]:
    def refuses_shape(scheme: Scheme, out_features: int, in_features: int) -> str | None:
        if out_features % out_multiple:
            return f"its {out_features} outputs are not divisible by {out_multiple}"
        if in_features % in_multiple:
            return f"its {in_features} inputs are not divisible by {in_multiple}"
        return None

    return refuses_shape


def _compressed_refuses_shape(scheme: Scheme, out_features: int, in_features: int) -> str | None:
    spec = scheme.weight
    if spec.type != "int":
        return None
    # In memory, rows end where words end, whatever the file's layout is.
    per_word = code_multiple(spec.bits)
    if in_features % per_word:
        return f"its {in_features} inputs are not divisible by {per_word}"
    if not spec.symmetric and out_features % per_word:
        return f"its {out_features} outputs are not divisible by {per_word}"
    return None


LAYOUTS: dict[str, Layout] = {
    row.name: row
    for row in (
        Layout(
            name="gptq",
            fields=gptq.TENSOR_NAMES,
            markers=("qweight", "qzeros"),
            encode=gptq.encode,
            decode=_decode_gptq,
            refuses=_gptq_refuses,
            refuses_shape=_needs_multiples(32, 32),
            second_file="quantize_config.json",
            group_index=True,
        ),
        Layout(
            name="awq",
            fields=("qweight", "qzeros", "scales"),
            markers=("qweight", "qzeros"),
            encode=awq.encode,
            decode=_decode_awq,
            refuses=_awq_refuses,
            refuses_shape=_needs_multiples(8, 8),
        ),
        Layout(
            name="compressed-tensors",
            fields=(
                "weight_packed",
                "weight",
                "weight_scale",
                "weight_zero_point",
                "weight_shape",
                "weight_g_idx",
                "weight_global_scale",
                *compressed_tensors.INPUT_FIELDS,
            ),
            markers=("weight_packed", "weight_scale"),
            encode=compressed_tensors.encode,
            decode=_decode_compressed,
            refuses=_compressed_refuses,
            refuses_shape=_compressed_refuses_shape,
            kv_scales=True,
        ),
    )
}


def _is_read_only(*_: object) -> str:
    return "is read and not written"


# What is read and not written, by the layout that a QuantConfig names.
READ_LAYOUTS: dict[str, Layout] = {
    row.name: row
    for row in (
        Layout(
            name="awq-gemv",
            fields=("qweight", "qzeros", "scales"),
            markers=("qweight", "qzeros"),
            encode=awq.encode,
            decode=_decode_gemv,
            refuses=_is_read_only,
            refuses_shape=_is_read_only,
        ),
        Layout(
            name="fp8",
            fields=("weight", "weight_scale_inv", "weight_scale", "input_scale"),
            markers=("weight_scale_inv",),
            encode=compressed_tensors.encode,
            decode=_decode_compressed,
            refuses=_is_read_only,
            refuses_shape=_is_read_only,
            aliases={"weight_scale_inv": "weight_scale"},
        ),
    )
}
MARKERS = {m for row in (*LAYOUTS.values(), *READ_LAYOUTS.values()) for m in row.markers}


def layout_of(config: QuantConfig) -> Layout:
    """The row that a configuration's tensors follow."""
    return (LAYOUTS | READ_LAYOUTS)[config.layout]


def default_format(scheme: Scheme) -> str:
    """Where a scheme loads in most servers."""
    spec = scheme.weight
    if scheme.activation is not None or spec.type != "int" or spec.bits not in (2, 3, 4, 8):
        return "compressed-tensors"
    if spec.symmetric or spec.bits in (2, 3):
        return "gptq"
    return "awq" if spec.bits == 4 else "compressed-tensors"


def find_layout(name: str) -> Layout:
    """The row of a format. Raises InputError where it is unknown."""
    if name not in LAYOUTS:
        raise InputError(f"format {name!r}", "unknown", f"known formats: {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def check_writable(layout: Layout, scheme: Scheme, subject: str = "") -> None:
    """Raise SchemeError, with the reason, where a layout cannot hold a scheme."""
    reason = layout.refuses(scheme)
    if reason is not None:
        able = [row.name for row in LAYOUTS.values() if row.refuses(scheme) is None]
        remedy = f"formats that can: {', '.join(able)}" if able else "no format can"
        raise SchemeError(
            subject or f"scheme {scheme}",
            f"cannot be written as {layout.name}: {layout.name} {reason}",
            remedy,
        )


def check_holds_kv_scales(layout: Layout, kv_cache: str | None) -> None:
    """Raise InputError where a layout has no place for the scales of an 8-bit KV cache."""
    if kv_cache is not None and kv_cache not in KV_CACHES:
        raise InputError(f"KV cache {kv_cache!r}", "unknown", f"known: {', '.join(KV_CACHES)}")
    if kv_cache is not None and not layout.kv_scales:
        able = ", ".join(row.name for row in LAYOUTS.values() if row.kv_scales)
        raise InputError(
            f"KV cache {kv_cache}", f"{layout.name} has no place for its scales", f"write {able}"
        )


def check_holds_groups(layout: Layout, act_order: bool) -> None:
    """Raise InputError where a layout is not written with groups of inputs that stand apart."""
    if act_order and not layout.group_index:
        able = ", ".join(row.name for row in LAYOUTS.values() if row.group_index)
        raise InputError("act-order", f"{layout.name} is not written with it", f"write {able}")


def why_not(layout: Layout, scheme: Scheme, out_features: int, in_features: int) -> str | None:
    """Why a linear of this shape cannot be written in a scheme; None: it can."""
    try:
        scheme.weight.check_shape("layer", out_features, in_features)
    except SchemeError as error:
        return error.problem
    return layout.refuses_shape(scheme, out_features, in_features)


def is_quantized(module: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Do a module's tensors hold codes, in any layout?"""
    if any(f"{module}.{marker}" in entries for marker in MARKERS):
        return True
    weight = entries.get(f"{module}.weight")
    return weight is not None and weight.dtype in (torch.int8, FP8_DTYPE)


def quantized_modules(entries: Mapping[str, TensorEntry]) -> list[str]:
    """Every module whose tensors hold codes, in the order of the file."""
    return [
        m for m in dict.fromkeys(n.rpartition(".")[0] for n in entries) if is_quantized(m, entries)
    ]


def tensor_names(module: str, layout: Layout, entries: Collection[str]) -> dict[str, str]:
    """Local name -> full name of the tensors that a quantized module has."""
    full = {field: f"{module}.{field}" for field in layout.fields}
    return {layout.aliases.get(f, f): name for f, name in full.items() if name in entries}


def decode_linear(module: str, tensors: dict[str, torch.Tensor], config: QuantConfig) -> Weight:
    """A module's weight, from its tensors by local name. Raises CheckpointError."""
    scheme = config.scheme_for(module)
    if scheme is None:
        raise CheckpointError(
            module, "has quantized tensors, but the configuration leaves it in float"
        )
    return layout_of(config).decode(tensors, scheme, config, module)


def encode_linear(
    weight: Weight, scheme: Scheme, layout: Layout, name: str, input_scale: object = None
) -> dict[str, torch.Tensor]:
    """A weight in a scheme, as the tensors that the file gets."""
    return layout.encode(with_activation(weight, scheme, input_scale, name), name)
