"""The layer that predicts the token after the next (MTP), behind a model's own in its checkpoint.

DeepSeek-V3's (arXiv 2412.19437, section 2.2), and GLM-4.5's: a decoder layer of the family, which
reads a state of the model and the token behind it:

    x = eh_proj([enorm(embedding of token i + 1), hnorm(state of position i)])
    state = shared_head.norm(layer(x))        logits of token i + 2 = shared_head.head(state)

The state is what the model's head reads, or the one that the layer itself made for the token before
that one. Knows names and shapes, no bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.checkpoint import TensorEntry
from formats.families import FAMILIES
from formats.family import Family, Shape, num_experts
from formats.layouts import is_quantized
from formats.table import size_text

# Below the layer.
EMBEDDING_NORM, STATE_NORM = "enorm.weight", "hnorm.weight"
PROJECTION = "eh_proj"  # the embedding comes first
LAST_NORM, HEAD, EMBEDDING = "shared_head.norm.weight", "shared_head.head", "embed_tokens.weight"
# Copies of the model's own: without them those are meant.
SHARED = (f"{HEAD}.weight", EMBEDDING)


def tensors(family: Family, config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    """What such a layer must have in a float checkpoint, by the names below it."""
    C = ("hidden_size",)
    return {
        EMBEDDING_NORM: (C,),
        STATE_NORM: (C,),
        f"{PROJECTION}.weight": (C, C * 2),
        LAST_NORM: (C,),
        **family.layer_tensors(config, layer),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayers:
    """What a checkpoint has of such layers."""

    stated: int  # by config.json
    layers: tuple[str, ...]  # those of which there is anything
    num_bytes: int
    missing: tuple[str, ...]  # tensors that those lack

    def to_text(self) -> str:
        """One line for people."""
        if not self.layers:
            return (
                f"layers for drafts: none, config.json states {self.stated}; the model runs without"
            )
        here = f"layers for drafts: {', '.join(self.layers)}, {size_text(self.num_bytes)}"
        if self.missing:
            return f"{here}, of no use: {self.missing[0]} is missing"
        return f'{here}; --speculative-config \'{{"method": "mtp"}}\' runs them, else nobody does'


def find_draft_layers(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> DraftLayers | None:
    """Those of a folder; None: config.json states none, or its family has none."""
    family = _family(config)
    prefixes = () if family is None else family.draft_layers(config)
    if not prefixes:
        return None
    layers, missing, num_bytes = [], [], 0
    for prefix in prefixes:
        found = {n.removeprefix(prefix): e for n, e in entries.items() if n.startswith(prefix)}
        if not found:
            continue
        layers.append(prefix.removesuffix("."))
        num_bytes += sum(entry.num_bytes for entry in found.values())
        number = int(layers[-1].rpartition(".")[2])
        missing += [
            prefix + name
            for name in tensors(family, config, number)
            if name not in found and not is_quantized(name.removesuffix(".weight"), found)
        ]
    return DraftLayers(
        stated=len(prefixes), layers=tuple(layers), num_bytes=num_bytes, missing=tuple(missing)
    )


def draft_linears(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> dict[str, tuple[int, int]]:
    """[N, K] of the float matrices of such layers, by their full names."""
    family = _family(config)
    found = {}
    for prefix in () if family is None else family.draft_layers(config):
        number = int(prefix.removesuffix(".").rpartition(".")[2])
        dense = family.experts is None or not family.experts.stand_in(number, config)
        projections = family.projections(num_experts(config) or 0, dense)
        names = [linear.name for projection in projections for linear in projection.linears]
        for name in (PROJECTION, *names, HEAD):
            entry = entries.get(f"{prefix}{name}.weight")
            if entry is not None and len(entry.shape) == 2:
                found[prefix + name] = entry.shape
    return found


def _family(config: Mapping[str, Any]) -> Family | None:
    """The one that config.json names, where it may have such layers."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    family = FAMILIES.get(name) if isinstance(name, str) else None
    return family if family is not None and family.draft_layers_key else None
