"""Checks of the presence and the values of the scales of an 8-bit KV cache."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.columns import ATTENTION
from formats.codecs.kv_cache import KEY, KV_SCALE_NAMES, check_kv_scale, find_kv_scales
from formats.errors import CheckpointError
from formats.families import known_family
from formats.inspection.files import Shards
from formats.inspection.findings import Findings
from formats.quant_config import BLOCK, QuantConfig
from formats.rules import LAYER_NUMBER

_PLACES = tuple(f".{place}" for places in KV_SCALE_NAMES.values() for place in places)


def check_kv_scales(
    config: Mapping[str, Any], quant: QuantConfig | None, shards: Shards, findings: Findings
) -> None:
    """Report scales that are missing, not above 0, or not announced in config.json.

    Layers that read another layer's keys need no scales.
    """
    family = known_family(config)
    attentions = {
        name.partition(f".{ATTENTION}.")[0] + f".{ATTENTION}"
        for name in (*shards.entries, *shards.lost)
        if LAYER_NUMBER.search(name) and f".{ATTENTION}." in name
    }
    stated = quant is not None and quant.kv_cache is not None
    unstated, missing, num_found = [], [], 0
    for attention in sorted(attentions, key=_layer_of):
        if family is not None and family.kind_of_layer(_layer_of(attention), config).shared:
            continue
        for kind, names in find_kv_scales(attention, shards).items():
            num_found += bool(names) or _is_lost(attention, kind, shards)
            if stated and not names and not _is_lost(attention, kind, shards):
                missing.append(f"{attention}.{kind}")
            if not stated:
                unstated += names
            for name in names:
                scale = shards.load(name, findings)
                try:
                    if scale is not None:
                        check_kv_scale(name, scale, stated and quant.kv_per_head)
                except CheckpointError as error:
                    findings.caught(error)
    for name in missing if num_found else ():
        findings.error(
            name,
            f"is missing, though config.json states an {quant.kv_cache} KV cache",
            "calibrate again",
        )
    if missing and not num_found:
        findings.warning(
            missing[0],
            "is missing, as are the scales of all other layers, though config.json states an"
            f" {quant.kv_cache} KV cache: this project keeps keys and values in 16 bits, others use"
            " scales of 1",
            "calibrate again, or remove the KV cache from the configuration",
        )
    if unstated:
        findings.warning(
            unstated[0],
            f"and {len(unstated) - 1} other scales of a KV cache are stored, but config.json states"
            " no 8-bit KV cache: other servers do not use them",
            f"state {BLOCK}.{KEY}",
        )


def _layer_of(name: str) -> int:
    return int(LAYER_NUMBER.search(name)[1])


def is_kv_scale(name: str) -> bool:
    """Return True if a tensor's name is one that writers use for a KV scale."""
    return f".{ATTENTION}." in name and name.endswith(_PLACES)


def _is_lost(attention: str, kind: str, shards: Shards) -> bool:
    """Return True if a damaged file holds the scale."""
    return any(f"{attention}.{place}" in shards.lost for place in KV_SCALE_NAMES[kind])
