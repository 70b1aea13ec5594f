"""Convert a checkpoint from one quantized format to another, code for code.

Only one linear and the shard being filled are in memory. Nothing is rounded again. A scheme that
the target cannot store exactly is refused before the first byte is written, a single linear when it
is reached.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from formats.checkpoint import DEFAULT_MAX_SHARD_BYTES, CheckpointReader
from formats.codecs import awq
from formats.errors import COPY_BLOCK, CheckpointError
from formats.files.block import quantization_block
from formats.files.model_path import is_gguf_folder
from formats.files.model_writer import open_writer
from formats.files.side_files import find_side_files
from formats.gguf.folder import read_index
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.weights import Weight, same_weight
from formats.inspection.inspect import inspect_checkpoint
from formats.layouts import (
    Layout,
    check_holds_embedding,
    check_holds_kv_scales,
    check_shape_writable,
    check_writable,
    decode_linear,
    encode_linear,
    find_layout,
    has_input_factors,
    layout_of,
    quantized_modules,
    tensor_names,
    why_no_scheme,
)
from formats.numerics.torch_state import torch_defaults
from formats.quant_config import BLOCK, QuantConfig, find_block
from formats.scheme import Scheme
from formats.table import count_text, names_text, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of a conversion."""

    source: str
    target: str
    from_format: str
    to_format: str
    scheme: str
    num_linears: int
    bytes_before: int  # bytes of all tensors of the source
    bytes_after: int
    seconds: float
    warnings: tuple[str, ...] = ()  # findings of the inspection, and linears without codes

    def to_text(self) -> str:
        return (
            "".join(f"{warning}\n" for warning in self.warnings)
            + f"{count_text(self.num_linears, 'linear')}, {self.scheme}, from {self.from_format} to"
            f" {self.to_format}: {size_text(self.bytes_before)} -> {size_text(self.bytes_after)}"
            f" in {self.seconds:.1f} s\nWrote {self.target}"
        )


@torch_defaults()
def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    output_format: str,
    *,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    quantizer: str = "qserve-kit",
) -> Conversion:
    """Write `source` in `output_format` to `target`, which appears only when it is complete.

    Every encoded linear is decoded again and compared bit for bit. Raises CheckpointError or
    SchemeError, naming the linear and the reason, if the format cannot store it.
    """
    began = time.perf_counter()
    reader = CheckpointReader(source, rounded=True, in_blocks=False)
    warnings = _check_sound(source)
    find_side_files(reader.folder)  # fail now, not after the work
    layout = find_layout(output_format)
    block = find_block(reader.folder, reader.config)
    if block is None:
        raise CheckpointError(str(source), f"has no {BLOCK}", "use `qserve quantize`")
    config = QuantConfig.from_dict(block)
    check_holds_kv_scales(layout, config.kv_cache)
    warnings += _left_in_floats(source, reader, layout)
    if config.unrounded_inputs:
        raise CheckpointError(
            str(source),
            f"its activations are {config.unrounded_inputs}, which conversion cannot preserve",
            f"the folder is {layout.name} already: use it as it is"
            if config.method == layout.name
            else "quantize the float model",
        )
    schemes = _schemes(reader, config, layout)
    new_config = QuantConfig.of_modules(
        layout.name,
        schemes,
        _quantizer(config, quantizer),
        kv_cache=config.kv_cache,
        kv_per_head=config.kv_per_head,
    )
    new_block = quantization_block(new_config, reader.config)
    modules = {name for name, scheme in schemes.items() if scheme is not None}
    fields = set(layout_of(config).fields)
    written = set()
    # Codes keep their bits. Other words, zeros and group indices take less than a tenth.
    least = reader.num_bytes * 9 // 10
    with open_writer(target, reader, min_bytes=least, max_shard_bytes=max_shard_bytes) as writer:
        for name in reader.entries:
            module, _, field = name.rpartition(".")
            if module not in modules or field not in fields:
                writer.add(name, reader.get(name))
            elif module not in written:
                written.add(module)
                weight = _read(reader, module, config, schemes[module])
                for local, tensor in _encode(weight, module, layout, new_config).items():
                    writer.add(f"{module}.{local}", tensor)
        staged = writer.seal({**reader.config, BLOCK: new_block}, side_files_from=reader.folder)
        if layout.second_file is not None:
            writer.write_json(layout.second_file, new_block)
        after = CheckpointReader(staged)
        writer.publish()
    return Conversion(
        source=str(source),
        target=str(target),
        from_format=config.method,
        to_format=layout.name,
        scheme=", ".join(dict.fromkeys(str(scheme) for scheme in schemes.values() if scheme)),
        num_linears=len(modules),
        bytes_before=sum(entry.num_bytes for entry in reader.entries.values()),
        bytes_after=sum(entry.num_bytes for entry in after.entries.values()),
        seconds=time.perf_counter() - began,
        warnings=warnings,
    )


def _check_sound(source: str | Path) -> tuple[str, ...]:
    """Return the warnings of an inspection.

    Raises CheckpointError on damage, which a conversion would hide.
    """
    problems = inspect_checkpoint(source).problems
    for problem in problems:
        if problem.severity == "error" and not problem.read_here:
            raise CheckpointError(problem.subject, problem.text, problem.remedy)
    return tuple(str(problem) for problem in problems)


def _left_in_floats(
    source: str | Path, reader: CheckpointReader, layout: Layout
) -> tuple[str, ...]:
    """Return a warning that names matrices of a GGUF file whose blocks have no form elsewhere.

    Raises CheckpointError if no linear has another form.
    """
    if not is_gguf_folder(reader.folder):
        return ()
    coded = set(quantized_modules(reader.entries))
    types = {
        name.removesuffix(".weight"): each.stored.type.name
        for name, each in read_index(reader.folder).presented.items()
        if not each.stored.type.float_dtype
    }
    if types and not coded:
        raise CheckpointError(
            str(source),
            f"{layout.name} cannot store its linears, which are in blocks of"
            f" {', '.join(sorted(set(types.values())))}",
            "serve the file as it is, or round its weights again with `qserve quantize`",
        )
    lost = [module for module in types if module not in coded]
    if not lost:
        return ()
    dtype = str(reader.entries[f"{lost[0]}.weight"].dtype).removeprefix("torch.")
    return (
        f"warning: {names_text(lost)}: written as {dtype} numbers: {layout.name} cannot store their"
        f" blocks of {', '.join(sorted({types[module] for module in lost}))}",
    )


def _schemes(
    reader: CheckpointReader, config: QuantConfig, layout: Layout
) -> dict[str, Scheme | None]:
    """Return the scheme of every linear, checked against the target; None: a float matrix."""
    quantized = set(quantized_modules(reader.entries))
    if not quantized:
        raise CheckpointError(
            str(reader.folder),
            f"has no quantized tensors, although config.json has a {BLOCK}",
            "copy config.json from the same checkpoint as the weights",
        )
    symmetric = config.layout in ("awq", "awq-gemv") and _all_symmetric(reader, quantized)
    schemes: dict[str, Scheme | None] = {}
    for name in reader.entries:
        module, _, field = name.rpartition(".")
        if module in schemes:
            continue
        if module not in quantized:
            is_layer_matrix = field == "weight" and ".layers." in module
            if is_layer_matrix and len(reader.entries[name].shape) == 2:
                schemes[module] = None
            continue
        scheme = config.scheme_for(module)
        if scheme is None:
            raise CheckpointError(module, why_no_scheme(module, config), COPY_BLOCK)
        if has_input_factors(module, reader.entries):
            raise CheckpointError(
                module,
                f"its inputs are multiplied by pre_quant_scale, which {layout.name} cannot"
                " store; without it the weights would differ",
                "serve the folder as it is, or quantize the float model",
            )
        check_holds_embedding(layout, module)
        if symmetric:  # AWQ stores symmetric weights as asymmetric ones with zeros of 8
            scheme = replace(scheme, weight=replace(scheme.weight, symmetric=True))
        check_writable(layout, scheme, module)
        schemes[module] = scheme
    return schemes


def _all_symmetric(reader: CheckpointReader, modules: set[str]) -> bool:
    """Return True if all zero points of an AWQ checkpoint are 8. Reads only the zeros."""
    names = [f"{module}.qzeros" for module in modules]
    return all(name not in reader or awq.is_symmetric(reader.get(name)) for name in names)


def _read(reader: CheckpointReader, module: str, config: QuantConfig, scheme: Scheme) -> Weight:
    names = tensor_names(module, layout_of(config), reader.entries)
    tensors = {field: reader.get(name) for field, name in names.items()}
    weight = decode_linear(module, tensors, config)
    if weight.spec.symmetric != scheme.weight.symmetric:
        weight = replace(weight, spec=replace(weight.spec, symmetric=scheme.weight.symmetric))
    if weight.spec.group_length(weight.in_features) != scheme.weight.group_length(
        weight.in_features
    ):
        raise CheckpointError(
            module,
            f"expected groups of {scheme.weight.group_size} inputs in its g_idx, found other sizes",
            "requantize without act-order",
        )
    return weight


def _encode(weight: Weight, module: str, layout: Layout, config: QuantConfig) -> dict:
    """Encode a linear in the new format and check it by decoding it again."""
    if weight.input_order is not None:
        raise CheckpointError(
            module,
            f"has a group index (act-order); servers refuse it in {layout.name}, so it is not"
            " written",
            "requantize without act-order",
        )
    check_shape_writable(layout, weight.scheme, module, weight.out_features, weight.in_features)
    if isinstance(weight, Fp4Weight):
        weight = weight.with_divisor(module)
    tensors = encode_linear(weight, weight.scheme, layout, module, weight.input_scale)
    different = same_weight(weight, decode_linear(module, tensors, config))
    if different is not None:
        raise CheckpointError(
            module,
            f"{layout.name} would change its {different}",
            "choose another `--format`, or serve the checkpoint as it is",
        )
    return tensors


def _quantizer(config: QuantConfig, converter: str) -> str:
    """Return the tool that chose the codes if the source states it, else `converter`."""
    return config.quantizer or converter
