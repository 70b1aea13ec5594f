"""The keys of a bitsandbytes block, as transformers writes it. Read only."""

from typing import Any

from formats.codecs.config_fields import BLOCK
from formats.errors import block_error, unsupported_error
from formats.other_tools.bitsandbytes import EIGHT_BIT_SPEC, TABLES, four_bit_spec
from formats.rules import float_modules
from formats.scheme import Scheme


def read(block: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a QuantConfig. Raises CheckpointError, naming the key.

    LLM.int8 also rounds inputs to 8 bits, except those above a threshold. Here inputs stay in 16
    bits, which changes no weight.
    """
    four, eight = (block.get(f"load_in_{bits}bit", False) for bits in (4, 8))
    for key, value in (("load_in_4bit", four), ("load_in_8bit", eight)):
        if not isinstance(value, bool):
            raise block_error(f"{BLOCK}.{key}", f"expected true or false, found {value!r:.80}")
    if four == eight:
        raise block_error(
            f"{BLOCK}.load_in_4bit",
            f"expected either it or load_in_8bit to be true, found {four} for both",
        )
    kind = block.get("bnb_4bit_quant_type", "fp4")
    if four and kind not in TABLES:
        raise unsupported_error(
            f"{BLOCK}.bnb_4bit_quant_type",
            f"expected one of {', '.join(TABLES)}, found {kind!r:.80}",
        )
    return {
        "scheme": Scheme(weight=four_bit_spec(kind) if four else EIGHT_BIT_SPEC),
        "rules": float_modules(
            block.get("llm_int8_skip_modules"), f"{BLOCK}.llm_int8_skip_modules"
        ),
        "lm_head": True,  # the tensors say whether the head is quantized
        "layout": "bitsandbytes-4bit" if four else "bitsandbytes-8bit",
    }
