"""Are the scales of an 8-bit KV cache there, and usable? Reads them; knows no cache."""

from formats.errors import CheckpointError
from formats.family import ATTENTION
from formats.findings import Findings
from formats.inspect_files import Shards
from formats.kv_cache import KEY, KV_SCALE_NAMES, check_kv_scale, find_kv_scales
from formats.quant_config import BLOCK, QuantConfig
from formats.rules import LAYER_NUMBER

_PLACES = tuple(f".{place}" for places in KV_SCALE_NAMES.values() for place in places)


def check_kv_scales(quant: QuantConfig | None, shards: Shards, findings: Findings) -> None:
    """Report scales that are missing in a layer, no number above 0, or stated by nobody."""
    attentions = {
        name.partition(f".{ATTENTION}.")[0] + f".{ATTENTION}"
        for name in (*shards.entries, *shards.lost)
        if LAYER_NUMBER.search(name) and f".{ATTENTION}." in name
    }
    stated = quant is not None and quant.kv_cache is not None
    unstated = []
    for attention in sorted(attentions, key=lambda name: int(LAYER_NUMBER.search(name)[1])):
        for kind, names in find_kv_scales(attention, shards).items():
            if stated and not names and not _is_lost(attention, kind, shards):
                findings.error(
                    f"{attention}.{kind}",
                    f"is missing, though config.json states an {quant.kv_cache} KV cache",
                    "calibrate again",
                )
            if not stated:
                unstated += names
            for name in names:
                scale = shards.load(name, findings)
                try:
                    if scale is not None:
                        check_kv_scale(name, scale, stated and quant.kv_per_head)
                except CheckpointError as error:
                    findings.caught(error)
    if unstated:
        findings.warning(
            unstated[0],
            f"and {len(unstated) - 1} more scales of a KV cache are there, but config.json states"
            " none: other servers do not use them",
            f"state {BLOCK}.{KEY}",
        )


def is_kv_scale(name: str) -> bool:
    """Is a tensor's name one that writers give such a scale?"""
    return f".{ATTENTION}." in name and name.endswith(_PLACES)


def _is_lost(attention: str, kind: str, shards: Shards) -> bool:
    """Does a damaged file hold it?"""
    return any(f"{attention}.{place}" in shards.lost for place in KV_SCALE_NAMES[kind])
