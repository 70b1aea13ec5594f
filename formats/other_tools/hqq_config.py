"""The keys of an HQQ block, as transformers writes it. Read only."""

from collections.abc import Mapping
from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import COPY_BLOCK, QUANTIZE_FLOAT, CheckpointError, block_error
from formats.other_tools.hqq import PACKED
from formats.rules import Rule, float_modules
from formats.scheme import CHANNEL, QuantSpec, Scheme, checked_group_size

WHERE = f"{BLOCK}.quant_config"
PARAMETERS = "weight_quant_params"
MAX_NAMES = 10_000


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key."""
    stated = block.get("quant_config")
    if not isinstance(stated, dict) or not stated or len(stated) > MAX_NAMES:
        raise block_error(WHERE, f"expected an object, found {stated!r:.80}")
    skipped = float_modules(block.get("skip_modules"), f"{BLOCK}.skip_modules")
    if PARAMETERS in stated:
        scheme, rules = _scheme(stated, WHERE), ()
    else:  # each key is the end of a linear's name, such as self_attn.q_proj; others are float
        named = {tag: _scheme(value, f"{WHERE} {tag[:60]!r}") for tag, value in stated.items()}
        scheme = next(iter(named.values()))
        rules = (
            *(Rule(kind="contains", text=f".{tag}", scheme=own) for tag, own in named.items()),
            Rule(kind="all", scheme=None),
        )
    return {
        "scheme": scheme,
        "rules": (*skipped, *rules),
        "lm_head": True,  # the tensors say whether the head is quantized
        "layout": "hqq",
    }


def _scheme(stated: Any, where: str) -> Scheme:
    if not isinstance(stated, dict) or not isinstance(stated.get(PARAMETERS), Mapping):
        raise block_error(where, f"expected an object with {PARAMETERS}, found {stated!r:.80}")
    values = stated[PARAMETERS]
    for key in ("scale_quant_params", "zero_quant_params"):
        if stated.get(key) is not None:
            raise CheckpointError(
                f"{where}.{key}",
                "quantized scales and zero points are not supported",
                QUANTIZE_FLOAT,
            )
    bits = values.get("nbits")
    if type(bits) is not int or bits not in PACKED:
        raise CheckpointError(
            f"{where}.{PARAMETERS}.nbits",
            f"expected one of {', '.join(map(str, PACKED))}, found {bits!r:.40}",
            QUANTIZE_FLOAT,
        )
    size = values.get("group_size")
    size = CHANNEL if size is None else checked_group_size(size, f"{where}: group size", COPY_BLOCK)
    spec = QuantSpec(bits=bits, symmetric=False, group_size=size, type="floatzero")
    return Scheme(weight=spec)
