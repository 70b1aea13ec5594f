"""config.json's `quantization_config` <-> QuantConfig: which scheme has which module.

Knows keys and values, not tensors. One module for each method reads and writes its keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats import (
    auto_round_config,
    awq_config,
    compressed_config,
    fp8_config,
    gptq_config,
    mxfp4,
)
from formats.checkpoint import read_json
from formats.config_fields import BLOCK, ConfigFields
from formats.errors import CheckpointError
from formats.rules import check_cost, first_match, split_schemes
from formats.scheme import Scheme

HEAD = "lm_head"
METHODS = {
    "gptq": gptq_config,
    "awq": awq_config,
    "compressed-tensors": compressed_config,
}
# Methods that are read and not written.
READ_ONLY = {"auto-round": auto_round_config, "fp8": fp8_config}
# Files that hold the block where config.json has none, and the method that they mean.
SECOND_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig(ConfigFields):
    """What a checkpoint says of its linears, in the keys of `method`."""

    method: str = "gptq"

    def __post_init__(self) -> None:
        if self.method == "gptq" and not self.zeros:
            object.__setattr__(self, "zeros", gptq_config.zeros_rule(self.scheme.weight))
        if not self.layout:
            object.__setattr__(self, "layout", self.method)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> "QuantConfig":
        """Read the block. Raises CheckpointError, naming the key, on what cannot be loaded."""
        if not isinstance(block, dict):
            raise CheckpointError(BLOCK, f"expected a JSON object, found {type(block).__name__}")
        method = block.get("quant_method")
        known = METHODS | READ_ONLY
        if not isinstance(method, str) or method not in known:
            raise CheckpointError(
                f"{BLOCK}.quant_method",
                f"expected one of {', '.join(known)}, found {method!r}",
                "convert the model",
            )
        config = cls(method=method, **known[method].read(block))
        check_cost(config.rules, BLOCK)
        return config

    @classmethod
    def of_modules(
        cls,
        method: str,
        schemes: Mapping[str, Scheme | None],
        quantizer: str = "",
        zeros: str = "",
        kv_cache: str | None = None,
        act_order: bool = False,
        kv_per_head: bool = False,
    ) -> "QuantConfig":
        """The config of a checkpoint whose linears have these schemes; None: left in float.

        `schemes` names every linear but a float head. Raises CheckpointError where the method
        cannot say it.
        """
        main, others = split_schemes(schemes)
        if main is None:
            raise CheckpointError("checkpoint", "none of its linears is quantized")
        return cls(
            method=method,
            scheme=METHODS[method].stored(main),
            rules=METHODS[method].rules_for(schemes, others),
            lm_head=schemes.get(HEAD) is not None,
            quantizer=quantizer,
            zeros=zeros,
            kv_cache=kv_cache,
            act_order=act_order,
            kv_per_head=kv_per_head,
        )

    def to_dict(self) -> dict[str, Any]:
        """The block that vLLM, SGLang and transformers read (see formats/README.md)."""
        return METHODS[self.method].write(self)

    @property
    def schemes(self) -> list[Scheme]:
        """All that it names, the main one first."""
        named = (self.scheme, *(rule.scheme for rule in self.rules))
        return [scheme for scheme in named if scheme is not None]

    def scheme_for(self, module: str) -> Scheme | None:
        """What the config gives a module; None: it stays in float."""
        if module == HEAD and not self.lm_head:
            return None
        rule = first_match(self.rules, module)
        return self.scheme if rule is None else rule.scheme


def second_file(folder: Path) -> str:
    """The file that holds the block where config.json has none; empty: there is none."""
    return next((name for name in SECOND_FILES if (folder / name).is_file()), "")


def find_block(folder: Path, config: Mapping[str, Any]) -> Any:
    """The quantization block: config.json's, or that of a second file; None: there is none.

    Nor is there one of MXFP4: it has no linears, and the family's row names its tensors.
    """
    block = config.get(BLOCK)
    if isinstance(block, dict) and block.get("quant_method") == mxfp4.METHOD:
        return None
    if block is not None:
        return block
    file_name = second_file(folder)
    if not file_name:
        return None
    return {"quant_method": SECOND_FILES[file_name], **read_json(folder / file_name)}
