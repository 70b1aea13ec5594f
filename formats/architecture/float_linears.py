"""Linears of a float checkpoint: names, shapes, and which of them stay in float."""

from collections.abc import Iterator, Mapping
from typing import Any

from formats.architecture.columns import Blocks
from formats.architecture.experts import Experts
from formats.architecture.family import Family
from formats.architecture.projection import Projection
from formats.architecture.sizes import size


def linear_shapes(
    family: Family, config: Mapping[str, Any], sizes: Mapping[str, int | None]
) -> dict[str, tuple[int, int]]:
    """Return [N, K] of every linear of every decoder layer, by full name.

    `sizes` is the result of `Family.sizes`, without None. Experts that are stored as one tensor are
    not included.
    """
    found = {}
    for layer in range(config[family.num_layers_key]):
        prefix = family.layer.format(i=layer)
        for linear in family.linears_of(config, layer):
            N, K = (size(names, sizes) for names in linear.shape)
            found[f"{prefix}.{linear.name}"] = (N, K)
    return found


def kept_in_float(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """Return full names of linears that stay in float unless asked for, with the reason."""
    found: dict[str, str] = {}
    mixer = family.state_mixer
    of_states = () if mixer is None else (mixer.gates, *mixer.selection)
    for layer in range(config[family.num_layers_key]):
        prefix, blocks = family.layer.format(i=layer), family.blocks(config, layer)
        in_float = of_states if blocks.state else ()
        in_float = (*in_float, family.head_gates) if blocks.attention else in_float
        for each in in_float:
            if each is not None:
                names = [f"{prefix}.{linear.name}" for linear in each.linears]
                found |= dict.fromkeys(names, each.float_because)
    return found


def routing_linears(family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """Return full names of linears that are never quantized, with the reason.

    A file must list them as float.
    """
    found, layers = {}, range(config[family.num_layers_key])
    prefixes = [family.layer.format(i=i) for i in layers]
    if family.layer_inputs is not None:
        found[family.layer_inputs.model_projection] = "makes inputs of all layers"
    found |= dict.fromkeys(family.stream_linears, "makes streams of hidden states")
    own = [f"{prefix}.{name}" for prefix in prefixes for name in family.float_linears]
    found |= dict.fromkeys(own, "belongs to a module of the layer that stays in float")
    experts = family.experts
    if experts is not None:
        for i in layers:
            if experts.is_in(i, config):
                found |= {f"{prefixes[i]}.{n}": why for n, why in of_routing(experts).items()}
    return found


def of_routing(experts: Experts) -> dict[str, str]:
    """Return the names below a layer of an expert block's never quantized linears, with the reason.

    transformers treats every Linear that is not listed as quantized: some routers
    (Router.is_linear), and gates of shared experts.
    """
    found = {experts.router: "routes tokens"} if experts.routing.is_linear else {}
    if experts.shared is not None and experts.shared.gate:
        found[experts.shared.gate] = "one output, which weighs the shared expert"
    return found


def float_projections(family: Family, blocks: Blocks) -> Iterator[Projection]:
    """Yield the projections of a layer that are never quantized: those beyond Family.projections.

    Routers are not included.
    """
    if blocks.state:
        yield from family.state_mixer.gate_linears
    shared = family.experts.shared if blocks.experts else None
    if shared is not None and shared.gate_projection is not None:
        yield shared.gate_projection


def routing_names(family: Family | None, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ends of names of routers and gates of shared experts.

    Programs load these matrices in float only.
    """
    experts = None if family is None else family.variant(config).experts
    if experts is None:
        return ()
    gate = "" if experts.shared is None else experts.shared.gate
    return tuple(f".{name}" for name in (experts.router, gate) if name)
