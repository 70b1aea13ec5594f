"""Checks that a folder holds every tensor of its model in the expected shape."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from formats.architecture.bare_model import INSTEAD_OF_HEAD, RANKER, RANKER_TENSORS
from formats.architecture.columns import Blocks, LayerKind
from formats.architecture.expert_names import missing_experts
from formats.architecture.family import DERIVED, Family
from formats.architecture.float_linears import routing_names
from formats.architecture.projection import Shape
from formats.architecture.sizes import size
from formats.checkpoint import CONFIG, TensorEntry
from formats.families import checked_family, known_family
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.inspection.kv import is_kv_scale
from formats.inspection.linear_summary import LinearSummary
from formats.layouts import ALL_LAYOUTS, is_quantized, quantized_modules
from formats.rules import LAYER_NUMBER

KEEP_FLOAT = "copy it from the float model, and list it as float in the quantization block"
_FIELDS = sorted({f for row in ALL_LAYOUTS.values() for f in row.fields}, key=len, reverse=True)
_IN_LAYER = re.compile(r"model\.layers\.\d{1,9}\.")
_QUANTIZED_FIELD = re.compile(rf"\.({'|'.join(_FIELDS)})$")


class HasEntries(Protocol):
    """Shards or a CheckpointReader."""

    entries: dict[str, TensorEntry]


def check_model(config: dict[str, Any], shards: Shards, findings: Findings) -> None:
    """Report tensors that are missing or duplicated, and layers that differ from the rest."""
    family = checked_family(config)
    if family is None or shards.damaged:
        return
    for name in family.model_tensors:
        if name == family.head and family.is_tied(config):
            continue
        if is_quantized(name.removesuffix(".weight"), shards.entries):
            continue
        if name not in shards and name not in shards.lost:
            findings.error(name, "is missing", "the checkpoint is incomplete")
    # A linear may lack g_idx, and may be float in one layer and quantized in another.
    seen = {
        _QUANTIZED_FIELD.sub(".weight", name)
        for name in (*shards.entries, *shards.lost)
        if LAYER_NUMBER.search(name) and not is_kv_scale(name)
    }
    locals_seen = Counter(LAYER_NUMBER.sub(".layers.{i}.", name) for name in seen)
    layers = {int(LAYER_NUMBER.search(name)[1]) for name in seen}
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and layers != set(range(min(count, 10**6))):
        findings.error(
            CONFIG,
            f"states {count} layers, the tensors are of {len(layers)}"
            + f" (0 to {max(layers)})" * bool(layers),
            "the checkpoint is incomplete",
        )
    places = family.layer_tensors(config)
    for local in places if layers else ():
        if f"{family.layer}.{local}" not in locals_seen:
            findings.error(
                f"{family.layer}.{local}",
                "is missing in all layers",
                "the checkpoint is incomplete, or config.json is another model's",
            )
    for local, number in sorted(locals_seen.items()):
        if number < len(layers):
            lacking = [i for i in sorted(layers) if local.replace("{i}", str(i)) not in seen]
            there = [local.replace("{i}", str(i)) for i in layers.difference(lacking)]
            has_place = local.removeprefix(f"{family.layer}.") in places
            if not has_place and all(_is_zero_bias(name, shards, findings) for name in there):
                continue
            findings.error(
                local, f"is missing in layers {lacking[:8]}", "the checkpoint is incomplete"
            )


def check_experts(config: Mapping[str, Any], shards: Shards, findings: Findings) -> None:
    """Report experts that are missing or have unknown names, and quantized routers."""
    if shards.damaged:
        return
    in_float = routing_names(known_family(config), config)
    for module in quantized_modules(shards.entries):
        if module.endswith(in_float):
            findings.error(module, "is quantized, and programs load it in float", KEEP_FLOAT)
            break
    missing = missing_experts(config, {*shards.entries, *shards.lost})
    if missing is not None:
        name, found = missing
        findings.error(
            name,
            f"is missing; the file has {found}",
            "the checkpoint is incomplete, or a tool gave its experts names that are not known",
        )


def check_places(
    config: Mapping[str, Any], layout: str | None, shards: Shards, findings: Findings
) -> str:
    """Report tensors that are not part of the model. Returns the first one's name, or "".

    `layout` is None if the folder is float, or if its configuration cannot be read.
    """
    family = checked_family(config)
    if family is None:
        return ""
    fields = _FIELDS if layout is None else ALL_LAYOUTS[layout].fields
    places = {f"{linear.name}.{field}" for linear in family.linears for field in fields}
    places.update(family.layer_tensors(config))
    ends = [name.removesuffix("weight") for name in (family.head, family.embedding)]
    outside = {*family.model_tensors, *(f"{end}{field}" for end in ends for field in fields)}
    if config.get(INSTEAD_OF_HEAD) == RANKER:
        outside |= set(RANKER_TENSORS)
    unplaced, unread = [], family.unread(config)
    for name in shards.entries:
        layer = _IN_LAYER.match(name)
        known = name[layer.end() :] in places if layer else name in outside
        known |= name.startswith(unread)  # of layers for drafts
        if known or is_kv_scale(name) or name.endswith(DERIVED):
            continue
        if not _is_zero_bias(name, shards, findings):
            unplaced.append(name)
    if unplaced:
        findings.warning(
            unplaced[0],
            "is not part of the model"
            + f", nor have {len(unplaced) - 1} other tensors" * (len(unplaced) > 1)
            + ": some readers refuse the folder for it, others leave it out",
            "remove them, or fix config.json",
        )
    return next(iter(unplaced), "")


def _is_zero_bias(name: str, shards: Shards, findings: Findings) -> bool:
    """Return True for an all-zero bias, which old GPTQ files add to models without biases."""
    bias = shards.load(name, findings) if name.endswith(".bias") else None
    return bias is not None and not bias.any()


def check_shapes(
    config: Mapping[str, Any],
    linears: Iterable[LinearSummary],
    shards: HasEntries,
    findings: Findings,
) -> None:
    """Report tensors whose shapes contradict config.json, and integers instead of floats."""
    family = known_family(config)
    if family is None:
        return
    family = family.variant(config)
    sizes, shape_of, checked = family.sizes(config), _shape_finder(family, config), set()
    for linear in linears:
        name = f"{linear.name}.weight"
        shape = shape_of(name)
        if shape is not None and len(shape) == 2:
            found = (linear.out_features, linear.in_features)
            _check_shape(linear.name, shape, found, sizes, findings)
            checked.add(name)
    for name, entry in shards.entries.items():
        shape = shape_of(name)
        if shape is None:
            continue
        if name not in checked:
            _check_shape(name, shape, entry.shape, sizes, findings)
        module, _, leaf = name.rpartition(".")
        may_be_codes = leaf == "weight" and is_quantized(module, shards.entries)
        if not entry.dtype.is_floating_point and not may_be_codes:
            findings.error(name, f"expected floating point, found {entry.dtype}")


def _shape_finder(family: Family, config: Mapping[str, Any]) -> Callable[[str], Shape | None]:
    """Return a function from a tensor's full name to its shape, also for optional biases.

    Layers that are not read may have any shapes.
    """
    further = family.further_layers(config)
    # key: type of the layer, and whether it has a recurrent state
    tables: dict[tuple[LayerKind, bool], dict[str, Shape]] = {}

    def find(name: str) -> Shape | None:
        if name.startswith(further):
            return None
        match = LAYER_NUMBER.search(name)
        layer = int(match[1]) if match else None
        has_state = layer is not None and family.has_state(layer, config)
        kind = family.kind_of_layer(layer, config), has_state
        shapes = tables.get(kind)
        if shapes is None:
            row = family.of_layer(layer, config)
            biases = {f"{linear.name}.bias": (linear.outputs,) for linear in row.linears}
            shapes = {**biases, **row.layer_tensors(config), **family.model_tensors}
            if has_state:  # the mixer's linears may be named like attention's in other layers
                linears = [each for made in row.state_mixer.projections for each in made.linears]
                shapes |= {f"{linear.name}.weight": linear.shape for linear in linears}
                shapes |= row.state_mixer.tensors(config)
                shapes |= row.norm_tensors(config, Blocks(attention=False, state=True))
            tables[kind] = shapes
        return shapes.get(LAYER_NUMBER.split(name)[-1])

    return find


def _check_shape(
    name: str,
    shape: Shape,
    found: tuple[int, ...],
    sizes: Mapping[str, int | None],
    findings: Findings,
) -> None:
    """Report a shape that differs; a size of None matches any."""
    wanted = [size(names, sizes) for names in shape]
    fits = len(found) == len(wanted) and all(
        expected in (None, features) for expected, features in zip(wanted, found, strict=True)
    )
    if not fits:
        findings.error(name, f"config.json states {wanted}, found {list(found)}")
