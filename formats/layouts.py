"""Table of checkpoint layouts; all reading and writing of quantized linears goes through it.

A row holds the encoder and decoder of a weight, the tensor names, the config block's writer, and
the schemes and shapes that the layout cannot store.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from formats.checkpoint import TensorEntry
from formats.codecs import awq, awq_gemv, compressed_tensors, gptq
from formats.codecs.config_fields import EMBEDDING
from formats.codecs.layout_limits import (
    awq_refuses,
    compressed_refuses,
    compressed_refuses_shape,
    gptq_refuses,
    needs_multiples,
)
from formats.errors import COPY_BLOCK, CheckpointError, InputError, SchemeError
from formats.gguf import staged
from formats.in_memory.dense import DenseWeight, is_dense
from formats.in_memory.fp8 import FP8_DTYPE
from formats.in_memory.weights import Weight, with_activation
from formats.names import KV_CACHES
from formats.other_tools import bitsandbytes, hqq, modelopt, quark, torchao
from formats.quant_config import QuantConfig
from formats.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A checkpoint format. `name` is what users type and what quant_method states."""

    name: str
    fields: tuple[str, ...]  # names of all tensors that a linear may have, except its bias
    markers: tuple[str, ...]  # a linear with any of these tensors is quantized
    encode: Callable[[Weight, str], dict[str, torch.Tensor]]
    decode: Callable[[dict[str, torch.Tensor], Scheme, QuantConfig, str], Weight]
    refuses: Callable[[Scheme], str | None]  # (scheme) -> why it cannot be written; None: it can
    refuses_shape: Callable[[Scheme, int, int], str | None]  # (scheme, N, K) -> the same
    second_file: str | None = None  # file with a copy of the config block, for old readers
    group_index: bool = False  # inputs of a group need not be adjacent (act-order)
    embeddings: bool = False  # the input embedding can be packed too
    kv_scales: bool = False  # its config block can describe an 8-bit KV cache
    fused_alike: bool = True  # servers fuse q, k and v (gate, up), which need the same scheme
    # name in the file -> name that `decode` expects
    aliases: Mapping[str, str] = field(default_factory=dict)
    # name that `decode` expects -> dimension of the outputs, for joint_decoding. Other tensors of
    # linears that are decoded together must be equal. Empty: each linear is decoded alone.
    output_axes: Mapping[str, int] = field(default_factory=dict)


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


def _decode_modelopt(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    if config.unrounded_inputs or scheme.activation is None:
        tensors = {field: t for field, t in tensors.items() if field != "input_scale"}
    return modelopt.decode(tensors, scheme, name)


def _decode_quark(reordered: bool) -> Callable[..., Weight]:
    def decode(
        tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
    ) -> Weight:
        if scheme.activation is None:
            tensors = {field: t for field, t in tensors.items() if not field.startswith("input_")}
        return quark.decode(tensors, scheme, name, reordered=reordered)

    return decode


def _decode_staged(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return staged.decode(tensors, scheme, name)


def _decode_4bit(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return bitsandbytes.decode_4bit(tensors, scheme.weight, name)


def _decode_8bit(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return bitsandbytes.decode_8bit(tensors, scheme.weight, name)


def _decode_torchao(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return torchao.decode(tensors, scheme, name)


def _decode_hqq(
    tensors: dict[str, torch.Tensor], scheme: Scheme, config: QuantConfig, name: str
) -> Weight:
    return hqq.decode(tensors, scheme.weight, name)


def _check_order(
    g_idx: torch.Tensor | None, in_features: int, scheme: Scheme, config: QuantConfig, name: str
) -> None:
    """Raise CheckpointError if inputs are regrouped although the configuration denies it.

    Some readers follow the index and others the configuration, so one of them would be wrong.
    """
    if g_idx is None or config.act_order:
        return
    length = scheme.weight.group_length(in_features)
    in_order = torch.arange(in_features, device=g_idx.device) // length
    if not torch.equal(g_idx.long(), in_order):
        raise CheckpointError(
            name,
            "inputs are not grouped in order, and the configuration does not say so",
            "state desc_act (actorder) if the index is intended, or remove it",
        )


BY_INPUT = {"qweight": 1, "qzeros": 1, "scales": 1}  # output_axes of gptq and awq
BY_OUTPUT = {"weight_packed": 0, "weight": 0, "weight_scale": 0, "weight_zero_point": 0}

LAYOUTS: dict[str, Layout] = {
    row.name: row
    for row in (
        Layout(
            name="gptq",
            fields=gptq.TENSOR_NAMES,
            markers=("qweight", "qzeros"),
            encode=gptq.encode,
            decode=_decode_gptq,
            refuses=gptq_refuses,
            refuses_shape=needs_multiples(32, 32),
            second_file="quantize_config.json",
            group_index=True,
            output_axes=BY_INPUT,
        ),
        Layout(
            name="awq",
            fields=("qweight", "qzeros", "scales"),
            markers=("qweight", "qzeros"),
            encode=awq.encode,
            decode=_decode_awq,
            refuses=awq_refuses,
            refuses_shape=needs_multiples(8, 8),
            output_axes=BY_INPUT,
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
            refuses=compressed_refuses,
            refuses_shape=compressed_refuses_shape,
            embeddings=True,
            kv_scales=True,
            output_axes=BY_OUTPUT,
        ),
    )
}


def _is_read_only(*_: object) -> str:
    return "is read and not written"


# Layouts that are read but not written, by QuantConfig.layout.
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
            fields=(
                "weight",
                "weight_scale_inv",
                "weight_scale",
                "input_scale",
                "activation_scale",
            ),
            markers=("weight_scale_inv",),
            encode=compressed_tensors.encode,
            decode=_decode_compressed,
            refuses=_is_read_only,
            refuses_shape=_is_read_only,
            # the keys are names in transformers
            aliases={"weight_scale_inv": "weight_scale", "activation_scale": "input_scale"},
            output_axes=BY_OUTPUT,
        ),
        Layout(
            name="gguf",
            fields=("weight_packed", "weight_scale", staged.BLOCKS),
            markers=("weight_packed", staged.BLOCKS),
            encode=compressed_tensors.encode,
            decode=_decode_staged,
            refuses=_is_read_only,
            refuses_shape=_is_read_only,
            fused_alike=False,
            output_axes=BY_OUTPUT | {staged.BLOCKS: 0},
        ),
        *(
            Layout(
                name=name,
                fields=fields,
                markers=markers,
                encode=compressed_tensors.encode,
                decode=decode,
                refuses=_is_read_only,
                refuses_shape=_is_read_only,
            )
            for name, fields, markers, decode in (
                (
                    "bitsandbytes-4bit",
                    bitsandbytes.FOUR_BIT_FIELDS,
                    ("weight.absmax",),
                    _decode_4bit,
                ),
                ("bitsandbytes-8bit", bitsandbytes.EIGHT_BIT_FIELDS, ("SCB",), _decode_8bit),
                ("torchao", torchao.FIELDS, torchao.MARKERS, _decode_torchao),
                ("hqq", hqq.FIELDS, (hqq.CODES, "nbits"), _decode_hqq),
                ("modelopt", modelopt.FIELDS, ("weight_scale",), _decode_modelopt),
                ("quark", quark.FIELDS, ("weight_scale",), _decode_quark(reordered=True)),
                ("quark-in-order", quark.FIELDS, ("weight_scale",), _decode_quark(reordered=False)),
            )
        ),
    )
}
# Layouts of staged folders, which are converted to a GGUF file
STAGED_LAYOUTS: dict[str, Layout] = {
    staged.METHOD: Layout(
        name=staged.METHOD,
        fields=(
            *(staged.BLOCKS, "weight_packed", "weight_scale"),
            *("weight_zero_point", "weight_shape"),
        ),
        markers=(staged.BLOCKS, "weight_packed"),
        encode=staged.encode,
        decode=_decode_staged,
        refuses=staged.refuses,
        refuses_shape=staged.refuses_shape,
        fused_alike=False,
    )
}
ALL_LAYOUTS = LAYOUTS | READ_LAYOUTS | STAGED_LAYOUTS
# Layouts that `inspect` checks by decoding each linear
READ_DECODED = (
    staged.METHOD,
    *("bitsandbytes-4bit", "bitsandbytes-8bit", "torchao", "hqq"),
    *("modelopt", "quark", "quark-in-order"),
)
MARKERS = {marker for row in ALL_LAYOUTS.values() for marker in row.markers}


def layout_of(config: QuantConfig) -> Layout:
    """Return the layout of a configuration's tensors."""
    return ALL_LAYOUTS[config.layout]


def default_format(scheme: Scheme) -> str:
    """Return the format in which most servers load a scheme."""
    spec = scheme.weight
    if scheme.activation is not None or spec.type != "int" or spec.bits not in (2, 3, 4, 8):
        return "compressed-tensors"
    if spec.symmetric or spec.bits in (2, 3):
        return "gptq"
    return "awq" if spec.bits == 4 else "compressed-tensors"


def find_layout(name: str) -> Layout:
    """Return the row of a format. Raises InputError if it is unknown."""
    row = (LAYOUTS | STAGED_LAYOUTS).get(name)
    if row is None:
        raise InputError(f"format {name!r}", "unknown", f"known formats: {', '.join(LAYOUTS)}")
    return row


def check_writable(layout: Layout, scheme: Scheme, subject: str = "") -> None:
    """Raise SchemeError, with the reason, if a layout cannot store a scheme."""
    reason = layout.refuses(scheme)
    if reason is not None:
        able = [row.name for row in LAYOUTS.values() if row.refuses(scheme) is None]
        remedy = f"write {' or '.join(able)}" if able else "use another scheme"
        if is_dense(scheme.weight):
            remedy += "; or quantize the float model"
        raise SchemeError(
            subject or f"scheme {scheme}",
            f"cannot be written as {layout.name}: {layout.name} {reason}",
            remedy,
        )


def check_holds_kv_scales(layout: Layout, kv_cache: str | None) -> None:
    """Raise InputError if a layout cannot store the scales of an 8-bit KV cache."""
    if kv_cache is not None and kv_cache not in KV_CACHES:
        raise InputError(f"KV cache {kv_cache!r}", "unknown", f"known: {', '.join(KV_CACHES)}")
    if kv_cache is not None and not layout.kv_scales:
        able = ", ".join(row.name for row in LAYOUTS.values() if row.kv_scales)
        raise InputError(
            f"KV cache {kv_cache}", f"{layout.name} cannot store its scales", f"write {able}"
        )


def check_holds_embedding(layout: Layout, module: str) -> None:
    """Raise CheckpointError if a module is the packed embedding and the layout cannot store it."""
    if module == EMBEDDING and not layout.embeddings:
        able = ", ".join(row.name for row in LAYOUTS.values() if row.embeddings)
        raise CheckpointError(
            module, f"is a packed input embedding, which {layout.name} cannot hold", f"write {able}"
        )


def check_holds_groups(layout: Layout, act_order: bool) -> None:
    """Raise InputError if a layout is never written with act-order."""
    if act_order and not layout.group_index:
        able = ", ".join(row.name for row in LAYOUTS.values() if row.group_index)
        raise InputError("act-order", f"cannot be stored as {layout.name}", f"write {able}")


def why_not(layout: Layout, scheme: Scheme, out_features: int, in_features: int) -> str | None:
    """Return why a linear of this shape cannot be written in a scheme; None: it can."""
    try:
        scheme.weight.check_shape("layer", out_features, in_features)
    except SchemeError as error:
        return error.problem
    return layout.refuses_shape(scheme, out_features, in_features)


def check_shape_writable(
    layout: Layout, scheme: Scheme, module: str, out_features: int, in_features: int
) -> None:
    """Raise SchemeError if a layout cannot store a linear of this shape in a scheme."""
    shape = out_features, in_features
    reason = why_not(layout, scheme, *shape)
    if reason is None:
        return
    rows = [row for row in LAYOUTS.values() if row.refuses(scheme) is None]
    able = [row.name for row in rows if why_not(row, scheme, *shape) is None]
    raise SchemeError(
        module,
        f"cannot be written as {layout.name}: {reason}",
        f"write {' or '.join(able)}" if able else "leave it in float",
    )


def is_quantized(module: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if a module's tensors hold codes, in any layout."""
    if any(f"{module}.{marker}" in entries for marker in MARKERS):
        return True
    weight = entries.get(f"{module}.weight")
    return weight is not None and weight.dtype in (torch.int8, FP8_DTYPE)


def is_float_view(name: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the tensor holds codes under a float dtype, as in some bitsandbytes files."""
    return f"{name}.absmax" in entries or name.endswith(f".{hqq.CODES}")


def quantized_modules(entries: Mapping[str, TensorEntry]) -> list[str]:
    """Return every module whose tensors hold codes, in the order of the file."""
    return [module for module in modules_of(entries) if is_quantized(module, entries)]


def modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules that tensors belong to, in order; p.weight.absmax also belongs to p."""
    found: dict[str, None] = {}
    for name in names:
        module = name.rpartition(".")[0]
        found[module] = None
        if module.endswith(".weight"):
            found[module.removesuffix(".weight")] = None
    return list(found)


def tensor_names(module: str, layout: Layout, entries: Collection[str]) -> dict[str, str]:
    """Map local names to full names of a quantized module's tensors."""
    full = {field: f"{module}.{field}" for field in layout.fields}
    return {layout.aliases.get(f, f): name for f, name in full.items() if name in entries}


def decode_linear(module: str, tensors: dict[str, torch.Tensor], config: QuantConfig) -> Weight:
    """Decode a module's weight from its tensors, given by local name. Raises CheckpointError."""
    scheme = config.scheme_for(module)
    if scheme is None:
        raise CheckpointError(module, why_no_scheme(module, config), COPY_BLOCK)
    return layout_of(config).decode(tensors, scheme, config, module)


def has_input_factors(module: str, entries: Collection[str]) -> bool:
    """Return True if the file has factors for a linear's inputs, which no kernel applies."""
    return f"{module}.{modelopt.PRE_SCALE}" in entries


def decode_dense(module: str, tensors: dict[str, torch.Tensor], config: QuantConfig) -> DenseWeight:
    """Decode a module's weight to floats, and apply the factors of its inputs, if any.

    Raises CheckpointError.
    """
    weight = decode_linear(module, tensors, config)
    if isinstance(weight, DenseWeight):
        return weight
    factors_K = modelopt.input_factors(tensors, weight.in_features, module)
    weight_NK = weight.dequantize()
    weight_NK = weight_NK if factors_K is None else weight_NK * factors_K
    return DenseWeight(weight_NK=weight_NK, spec=weight.spec)


def why_no_scheme(module: str, config: QuantConfig) -> str:
    """Return why a module with quantized tensors has no scheme in the configuration."""
    if module != EMBEDDING or layout_of(config).embeddings:
        return "has quantized tensors, but the configuration leaves it in float"
    able = ", ".join(row.name for row in LAYOUTS.values() if row.embeddings)
    return f"is a packed input embedding, which is read from {able} alone, not {config.method}"


def encode_linear(
    weight: Weight, scheme: Scheme, layout: Layout, name: str, input_scale: object = None
) -> dict[str, torch.Tensor]:
    """Encode a weight in a scheme as tensors of a file."""
    return layout.encode(with_activation(weight, scheme, input_scale, name), name)
