"""Multi-token prediction (MTP) layers, stored next to a model's own layers.

An MTP layer predicts the token after the next. It is a decoder layer of the family with attention,
and reads a state of the model and the next token. DeepSeek-V3 (arXiv 2412.19437, section 2.2),
GLM-4.5 and Qwen3.5 have such layers. The equations, in DeepSeek's names:

    x = eh_proj([enorm(embedding of token i + 1), hnorm(state of position i)])
    state = shared_head.norm(layer(x))        logits of token i + 2 = shared_head.head(state)

The state of position i is the input of the model's head. For further drafts it is the MTP layer's
own state of the previous token. This module handles names and shapes only; `DraftNames` has the
layouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.architecture.family import Family
from formats.architecture.projection import Shape
from formats.architecture.sizes import MAX_EXPERTS, num_experts
from formats.checkpoint import TensorEntry
from formats.families import family_of
from formats.layouts import is_quantized
from formats.table import size_text


def tensors(family: Family, config: Mapping[str, Any], prefix: str) -> dict[str, Shape]:
    """Return the tensors that an MTP layer must have in a float checkpoint, by name below it."""
    C, names = ("hidden_size",), family.draft_names
    layer = family.layer_tensors(config, layer_number(family, prefix))
    return {
        names.embedding_norm: (C,),
        names.state_norm: (C,),
        f"{names.projection}.weight": (C, C * 2),
        names.last_norm: (C,),
        **{f"{names.layer}{name}": shape for name, shape in layer.items()},
    }


def layer_number(family: Family, prefix: str) -> int | None:
    """Return an MTP layer's number after the model's layers; None if it has a separate prefix."""
    return None if family.draft_names.layer else int(prefix.removesuffix(".").rpartition(".")[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayers:
    """MTP layers of a checkpoint."""

    stated: int  # number of MTP layers in config.json
    layers: tuple[str, ...]  # layers with at least one tensor
    num_bytes: int
    missing: tuple[str, ...]  # tensors that these layers lack

    def to_text(self) -> str:
        """Return a line for reports."""
        if not self.layers:
            return f"draft layers: none, config.json states {self.stated}; the model runs without"
        here = f"draft layers: {', '.join(self.layers)}, {size_text(self.num_bytes)}"
        if self.missing:
            return f"{here}, unusable: {self.missing[0]} is missing"
        return (
            f'{here}; --speculative-config \'{{"method": "mtp"}}\' runs them, else they are unused'
        )


def find_draft_layers(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> DraftLayers | None:
    """Find the MTP layers of a folder; None: config.json states none, or the family has none."""
    family = _family(config)
    prefixes = () if family is None else family.draft_layers(config)
    if not prefixes:
        return None
    is_stated = not family.draft_names.layer or family.draft_names.count_key in config
    if not is_stated and not any(name.startswith(prefixes) for name in entries):
        return None
    layers, missing, num_bytes = [], [], 0
    for prefix in prefixes:
        found = {n.removeprefix(prefix): e for n, e in entries.items() if n.startswith(prefix)}
        if not found:
            continue
        layers.append(prefix.removesuffix("."))
        num_bytes += sum(entry.num_bytes for entry in found.values())
        missing += [
            prefix + name
            for name in tensors(family, config, prefix)
            if name not in found and not is_quantized(name.removesuffix(".weight"), found)
        ]
    return DraftLayers(
        stated=len(prefixes), layers=tuple(layers), num_bytes=num_bytes, missing=tuple(missing)
    )


def draft_linears(
    config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> dict[str, tuple[int, int]]:
    """Return [N, K] of the float matrices of MTP layers, by full name."""
    family = _family(config)
    found = {}
    if family is not None and family.draft_prefix:
        for name, entry in entries.items():
            if name.startswith(family.draft_prefix) and name.endswith(".weight"):
                found |= (
                    {name.removesuffix(".weight"): entry.shape} if len(entry.shape) == 2 else {}
                )
    for prefix in () if family is None else family.draft_layers(config):
        blocks = family.blocks(config, layer_number(family, prefix))
        count = min(num_experts(config) or 0, MAX_EXPERTS)
        projections = family.projections(blocks, count)
        own, linears = family.draft_names, [each for made in projections for each in made.linears]
        for name in (own.projection, *(own.layer + each.name for each in linears), own.head):
            entry = entries.get(f"{prefix}{name}.weight")
            if entry is not None and len(entry.shape) == 2:
                found[prefix + name] = entry.shape
    return found


def _family(config: Mapping[str, Any]) -> Family | None:
    """Return the family that config.json names, if it may have MTP layers."""
    family = family_of(config)
    has_any = family is not None and (family.draft_layers_key or family.draft_prefix)
    return family.variant(config) if has_any else None
