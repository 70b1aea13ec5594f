"""Writer of a complete model folder from a user's own codes, with a check of the result.

`qserve.save_quantized` is exported from here. The folder is staged and read back, and gets its name
only when it is complete. Legend: N outputs, K inputs, G groups.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from formats.architecture.float_linears import routing_names
from formats.architecture.tied_head import says_tied
from formats.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    CheckpointReader,
)
from formats.compatibility.before_writing import check_readers, verdicts_of
from formats.compatibility.loads_in import Verdict
from formats.errors import CheckpointError, InputError, one_line
from formats.families import known_family
from formats.files.block import quantization_block
from formats.files.model_writer import min_bytes, open_writer
from formats.files.side_files import find_side_files
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight, same_weight
from formats.layouts import (
    Layout,
    check_shape_writable,
    check_writable,
    decode_linear,
    default_format,
    encode_linear,
    find_layout,
    why_not,
)
from formats.numerics.torch_state import torch_defaults
from formats.plan import ACT_ORDER_FORMAT, EXCEPTIONS_FORMAT
from formats.quant_config import BLOCK, HEAD, QuantConfig
from formats.rules import LAYER_NUMBER, split_schemes
from formats.scheme import CHANNEL, QuantSpec, Scheme
from formats.table import count_text, names_text, size_text

BITS = (2, 3, 4, 8)  # without a scheme, the smallest of these that holds the largest code


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Saved:
    """Result of save_quantized; prints as a summary of a few lines."""

    folder: str
    format: str
    schemes: dict[str, str]  # schemes of the quantized linears, by name
    left_in_float: tuple[str, ...]
    num_bytes: int
    loads_in: tuple[Verdict, ...]

    def __repr__(self) -> str:
        return self.to_text()

    def to_text(self) -> str:
        counts = ", ".join(sorted(set(self.schemes.values())))
        lines = [
            f"{count_text(len(self.schemes), 'linear')}, {counts}, as {self.format}:"
            f" {size_text(self.num_bytes)} in {self.folder}"
        ]
        if self.left_in_float:
            lines.append(f"left in float: {names_text(self.left_in_float)}")
        for verdict in self.loads_in:
            lines.append(": ".join(part for part in verdict if part))
        return "\n".join(lines)


@torch_defaults()
def save_quantized(
    folder: str | Path,
    source_model: str | Path,
    linears: Mapping[str, Any],
    *,
    format: str | None = None,
    scheme: str | Scheme | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    readers: Sequence[str] = ("vLLM",),
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    quantizer: str = "qserve-kit",
) -> Saved:
    """Write `source_model` with these linears quantized to the new `folder`.

    `linears` maps full names, such as model.layers.0.mlp.up_proj, to a QuantLinear, a PackedWeight,
    or (codes [N, K], scales [N, G], zeros [N, G] or None) in torch or numpy. Codes count from 0;
    zeros None means symmetric. All other tensors are copied from the source bit for bit, except
    those in `tensors`, by full name.

    A `scheme` such as "w8a8" states bits, symmetry and activations of all linears; without it, they
    follow from the codes. The group size follows from the scales, unless the scheme states it
    ("w4a16-sym-g64"). Without a `format`, the default of `qserve quantize` is used.

    Raises InputError before anything is written if names, shapes or numbers do not fit the model,
    or if the format cannot store them. Also raises it if one of `readers` (vLLM, SGLang,
    transformers, this project) would not load the folder; the message names a format that it loads.
    """
    if not isinstance(source_model, str | Path):
        raise InputError(
            "source_model",
            f"expected the folder of the float model, found {type(source_model).__name__}",
            "the other tensors, the tokenizer and the config are copied from its files",
        )
    reader = CheckpointReader(source_model)
    find_side_files(reader.folder)  # fail now, not after the work
    if reader.config.get(BLOCK) is not None:
        raise CheckpointError(
            str(source_model), f"its config.json has a {BLOCK}", "start from the float model"
        )
    weights = _weights(linears, scheme, reader)
    others = _other_tensors(linears, tensors or {}, reader)
    schemes = _schemes(weights, reader)
    layout = _default_layout(weights, schemes) if format is None else find_layout(format)
    for name, weight in weights.items():
        check_writable(layout, weight.scheme, name)
        check_shape_writable(layout, weight.scheme, name, weight.out_features, weight.in_features)
    config = QuantConfig.of_modules(layout.name, schemes, quantizer)
    verdicts, findings = verdicts_of(config, schemes, reader)
    check_readers(readers, verdicts, findings, layout, schemes, reader)
    block = quantization_block(config, reader.config)
    least = min_bytes(reader, schemes)
    with open_writer(folder, reader, min_bytes=least, max_shard_bytes=max_shard_bytes) as writer:
        tied = says_tied(reader.config)
        for name in reader.entries:
            module, _, field = name.rpartition(".")
            if module in weights and field == "weight":
                weight = weights[module]
                encoded = encode_linear(weight, weight.scheme, layout, module, weight.input_scale)
                for local, tensor in encoded.items():
                    writer.add(f"{module}.{local}", tensor)
            elif not (tied and name == f"{HEAD}.weight"):
                writer.add(name, others.get(name, reader.get(name)))
        staged = writer.seal({**reader.config, BLOCK: block}, side_files_from=reader.folder)
        if layout.second_file is not None:
            writer.write_json(layout.second_file, block)
        written = CheckpointReader(staged)
        _verify(written, weights, others, reader, layout)
        writer.publish()
    return Saved(
        folder=str(folder),
        format=layout.name,
        schemes={name: str(weight.scheme) for name, weight in weights.items()},
        left_in_float=tuple(name for name, own in schemes.items() if own is None),
        num_bytes=sum(entry.num_bytes for entry in written.entries.values()),
        loads_in=tuple(verdicts),
    )


def _weights(
    linears: Mapping[str, Any], scheme: str | Scheme | None, reader: CheckpointReader
) -> dict[str, Weight]:
    """Return every linear in its in-memory form, checked against the model's shape."""
    if not isinstance(linears, Mapping) or not linears:
        found = "none" if isinstance(linears, Mapping) else type(linears).__name__
        raise InputError(
            "linears",
            f"expected one or more by name, in a mapping, found {found}",
            "give a dict such as {'model.layers.0.mlp.up_proj': (codes, scales)}",
        )
    if scheme is not None:
        Scheme.parse(scheme)  # raises on an unknown format before the linears are read
    linears = {
        name: tuple(None if part is None else _tensor(part, name) for part in value)
        if isinstance(value, tuple)
        else value
        for name, value in linears.items()
    }
    codes = [value[0] for value in linears.values() if isinstance(value, tuple) and value]
    integers = [each for each in codes if each is not None and not each.is_floating_point()]
    largest = max((int(each.max()) for each in integers if each.numel()), default=0)
    bits = next((b for b in BITS if largest < 2**b), BITS[-1])
    weights = {}
    for name, value in linears.items():
        if not isinstance(name, str):
            raise InputError(
                "linears",
                f"expected names of linears as keys, found {name!r:.80}",
                "use the names of the model's linears, such as 'model.layers.0.mlp.up_proj'",
            )
        if name == HEAD and says_tied(reader.config):
            raise InputError(
                name,
                "is the embedding (tie_word_embeddings), which stays in float",
                "leave it out; `qserve quantize --quantize-head` gives it codes of its own",
            )
        entry = reader.entries.get(f"{name}.weight")
        if entry is None:
            raise InputError(name, f"{reader.folder} has no {name}.weight", _nearest(name, reader))
        _check_place(name, reader)
        if isinstance(value, tuple):
            weight = _from_codes(name, value, scheme, bits, tuple(entry.shape))
        elif isinstance(value, Weight):
            weight = value
        elif callable(getattr(value, "packed", None)):  # a QuantLinear
            weight = _of_layer(name, value)
        else:
            raise InputError(
                name,
                "expected a QuantLinear, a PackedWeight or (codes, scales, zeros), found"
                f" {type(value).__name__}",
                "give codes, or make a layer with QuantLinear.from_float",
            )
        weight.check(name)
        if scheme is not None:
            _check_scheme(name, weight, scheme)
        if isinstance(weight, PackedWeight):
            weight.check_range(name)
        _check_shape(name, (weight.out_features, weight.in_features), tuple(entry.shape))
        weights[name] = weight.to("cpu")
    from_codes = [name for name, value in linears.items() if isinstance(value, tuple)]
    return {**weights, **_in_equal_groups({name: weights[name] for name in from_codes})}


def _of_layer(name: str, layer: Any) -> Weight:
    """Return the weight of a QuantLinear; its errors get the layer's name."""
    try:
        return layer.packed()
    except InputError as error:
        raise InputError(name, error.problem, error.remedy) from None


def _check_scheme(name: str, weight: Weight, scheme: str | Scheme) -> None:
    """Raise InputError unless a weight has the scheme that was stated for all."""
    own, K = weight.scheme, weight.in_features
    stated = Scheme.of_scales(scheme, own.weight.num_groups(K), K, name)
    in_own_groups = replace(stated.weight, group_size=own.weight.group_size)
    if (in_own_groups, stated.activation) != (own.weight, own.activation) or (
        stated.weight.num_groups(K) != own.weight.num_groups(K)
    ):
        raise InputError(
            name, f"has the scheme {own}, but scheme={str(scheme)!r} is stated", "leave it out"
        )


def _in_equal_groups(weights: Mapping[str, PackedWeight]) -> dict[str, PackedWeight]:
    """Return weights whose only group has the length of the others' groups as of this length.

    Their scales say "one group of all inputs" as well, which would be another scheme.
    """
    sizes = {weight.spec.group_size for weight in weights.values()}
    return {
        name: replace(weight, spec=replace(weight.spec, group_size=weight.in_features))
        if weight.spec.group_size == CHANNEL and weight.in_features in sizes
        else weight
        for name, weight in weights.items()
    }


def _nearest(name: str, reader: CheckpointReader) -> str:
    """Return the remedy for a name that the model does not have."""
    linears = [
        entry.removesuffix(".weight")
        for entry, stored in reader.entries.items()
        if LAYER_NUMBER.search(entry) and len(stored.shape) == 2
    ]
    if name.removesuffix(".weight") in linears:
        return "give names without .weight"
    near = difflib.get_close_matches(name, linears, 1, cutoff=0.0)
    return f"one of its linears is {near[0]}" if near else "it has no linears in layers"


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise InputError(
            name,
            f"has {list(found)} codes, the model's weight is {list(expected)}",
            "give codes as [outputs, inputs]",
        )


def _from_codes(
    name: str, value: tuple, scheme: str | Scheme | None, bits: int, shape: tuple[int, ...]
) -> PackedWeight:
    """Return the weight of (codes, scales, zeros). `shape`: that of the model's weight."""
    if len(value) not in (2, 3):
        raise InputError(
            name,
            f"expected (codes, scales, zeros), found {len(value)} parts",
            "give a tuple (codes, scales) or (codes, scales, zeros)",
        )
    codes_NK, scales_NG, *zeros = value
    zeros_NG = zeros[0] if zeros else None
    if codes_NK is None or scales_NG is None or codes_NK.ndim != 2 or scales_NG.ndim != 2:
        found = [None if part is None else list(part.shape) for part in (codes_NK, scales_NG)]
        raise InputError(
            name,
            f"expected codes [N, K] and scales [N, G], found {found[0]} and {found[1]}",
            "give 2-d tensors for both",
        )
    _check_shape(name, tuple(codes_NK.shape), shape)
    if len(scales_NG) != len(codes_NK):
        found = f"expected [{len(codes_NK)}, groups], found {list(scales_NG.shape)}"
        raise InputError(f"{name} scales", found, f"codes are {list(codes_NK.shape)}")
    groups, in_features = scales_NG.shape[1], codes_NK.shape[1]
    if groups < 1 or in_features % groups:
        raise InputError(
            name,
            f"its {in_features} inputs do not make {groups} equal groups",
            "give scales [N, G] with a G that divides the inputs",
        )
    if scheme is None:
        middle = 2 ** (bits - 1)
        symmetric = zeros_NG is None or bool((zeros_NG == middle).all())
        is_known = codes_NK.numel() and not codes_NK.is_floating_point()  # floats are refused below
        largest = int(codes_NK.max()) if is_known else middle
        if zeros_NG is None and largest < middle:
            raise InputError(
                name,
                f"its largest code is {largest}: with the {bits} bits that the largest code of all"
                f" linears needs, codes below {middle} are negative weights",
                "state the scheme, such as scheme='w4a16-sym'; if linears differ in bits, give"
                " QuantLinear.from_codes(codes, scales, scheme=...) for each",
            )
        size = CHANNEL if groups == 1 else in_features // groups
        stated = Scheme(weight=QuantSpec(bits=bits, symmetric=symmetric, group_size=size))
    else:
        stated = Scheme.of_scales(scheme, groups, in_features, name)
    weight = PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, stated.weight, name)
    return replace(weight, activation=stated.activation)


def _default_layout(weights: Mapping[str, Weight], schemes: Mapping[str, Scheme | None]) -> Layout:
    """Return the layout that `qserve quantize` chooses without --format (formats/plan.py).

    It is the scheme's default, or compressed-tensors if linears differ and it can store them.
    """
    if any(weight.input_order is not None for weight in weights.values()):
        return find_layout(ACT_ORDER_FORMAT)
    main, exceptions = split_schemes(schemes)
    usual, other = find_layout(default_format(main)), find_layout(EXCEPTIONS_FORMAT)
    held = {layout.name: _holds(layout, weights) for layout in (usual, other)}
    return other if held[other.name] and (exceptions or not held[usual.name]) else usual


def _holds(layout: Layout, weights: Mapping[str, Weight]) -> bool:
    return all(
        layout.refuses(w.scheme) is None
        and why_not(layout, w.scheme, w.out_features, w.in_features) is None
        for w in weights.values()
    )


def _check_place(name: str, reader: CheckpointReader) -> None:
    """Raise InputError if readers do not support a quantized matrix of that name."""
    if name.endswith(routing_names(known_family(reader.config), reader.config)):
        raise InputError(name, "routes tokens: no reader loads it quantized", "leave it in float")
    if name != HEAD and not LAYER_NUMBER.search(name):
        raise InputError(
            name, "is not a linear of a layer: no reader loads it quantized", "leave it in float"
        )


def _tensor(value: Any, name: str) -> torch.Tensor:
    """Convert a torch or numpy value to a tensor with data."""
    try:
        found = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            name,
            f"expected tensors or arrays of numbers: {one_line(error)}",
            "give torch tensors, or numpy arrays of numbers",
        ) from None
    if found.is_meta:
        raise InputError(
            name,
            "its tensors are on the meta device, without numbers",
            "load the model's weights first",
        )
    # torch has few operations for unsigned types wider than 8 bits
    return found.long() if found.dtype in (torch.uint16, torch.uint32, torch.uint64) else found


def _other_tensors(
    linears: Mapping[str, Any], given: Mapping[str, torch.Tensor], reader: CheckpointReader
) -> dict[str, torch.Tensor]:
    """Return replacements of the source's tensors: those given, and biases of QuantLinears."""
    if not isinstance(given, Mapping):
        raise InputError(
            "tensors",
            f"expected a mapping by name, found {type(given).__name__}",
            "give a dict of tensors by name",
        )
    found = dict(given)
    for name, value in linears.items():
        bias = getattr(value, "bias", None)
        if bias is None:
            continue
        if f"{name}.bias" in reader:
            found.setdefault(f"{name}.bias", bias)
        elif bool((bias != 0).any()):
            raise InputError(name, "has a bias, the model has none there", "no reader can load it")
    for name, tensor in found.items():
        if name.removesuffix(".weight") in linears:
            raise InputError(name, "is given twice: as codes, and in tensors", "leave one out")
        if not isinstance(tensor, torch.Tensor) and not hasattr(tensor, "__array__"):
            raise InputError(
                name,
                f"expected a tensor, found {type(tensor).__name__}",
                "convert it with torch.as_tensor",
            )
        tensor = _tensor(tensor, name)
        entry = reader.entries.get(name)
        if entry is None or tuple(tensor.shape) != entry.shape:
            wanted = "no such tensor" if entry is None else str(list(entry.shape))
            raise InputError(
                name,
                f"found {list(tensor.shape)}, the model has {wanted}",
                "give a tensor of the model's name and shape",
            )
        found[name] = tensor.detach().cpu().to(entry.dtype)
        if not torch.isfinite(found[name]).all():
            raise InputError(
                name,
                f"contains NaN or infinity in the model's {entry.dtype}",
                "replace these values, or use a model in float32",
            )
    return found


def _schemes(weights: Mapping[str, Weight], reader: CheckpointReader) -> dict[str, Scheme | None]:
    """Return the scheme of every matrix of a layer, in the file's order; None: float."""
    schemes: dict[str, Scheme | None] = {}
    for name, entry in reader.entries.items():
        module, _, field = name.rpartition(".")
        if module in weights:
            schemes[module] = weights[module].scheme
        elif field == "weight" and LAYER_NUMBER.search(module) and len(entry.shape) == 2:
            schemes[module] = None
    return schemes


def _verify(
    written: CheckpointReader,
    weights: Mapping[str, Weight],
    others: Mapping[str, torch.Tensor],
    source: CheckpointReader,
    layout: Layout,
) -> None:
    """Read everything back. Raises CheckpointError, naming the tensor."""
    config = QuantConfig.from_dict(written.config[BLOCK])
    by_module: dict[str, dict[str, torch.Tensor]] = {}
    for name in written.entries:
        module, _, field = name.rpartition(".")
        tensor = written.get(name)
        if module in weights and field in layout.fields:
            by_module.setdefault(module, {})[field] = tensor
            if len(by_module[module]) < len(_fields(module, layout, written)):
                continue
            found = decode_linear(module, by_module.pop(module), config)
            stored = replace(
                found, spec=weights[module].spec
            )  # AWQ stores symmetric codes as asymmetric
            different = same_weight(stored, weights[module])
        else:
            expected = others.get(name)
            expected = source.get(name) if expected is None else expected
            same = tensor.dtype == expected.dtype and torch.equal(_bytes(tensor), _bytes(expected))
            different = None if same else "bytes"
        if different is not None:
            raise CheckpointError(name, f"its {different} differ from what was given", "try again")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _fields(module: str, layout: Layout, written: CheckpointReader) -> list[str]:
    return [field for field in layout.fields if f"{module}.{field}" in written]
