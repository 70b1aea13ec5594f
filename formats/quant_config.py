"""Convert config.json's `quantization_config` to and from QuantConfig, the scheme of each module.

Each method has a module that reads and writes its keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import read_json
from formats.codecs import awq_config, compressed_config, fp8_config, gptq_config, mxfp4
from formats.codecs.config_fields import BLOCK, EMBEDDING, ConfigFields
from formats.errors import COPY_BLOCK, CheckpointError, InputError
from formats.gguf import config_block as gguf_block
from formats.gguf import staged
from formats.other_tools import (
    auto_round_config,
    bitsandbytes_config,
    hqq_config,
    modelopt_config,
    quark_config,
    torchao_config,
    unread_methods,
)
from formats.rules import check_cost, first_match, split_schemes
from formats.scheme import Scheme

HEAD = "lm_head"
METHODS = {
    "gptq": gptq_config,
    "awq": awq_config,
    "compressed-tensors": compressed_config,
}
WRITTEN = {**METHODS, staged.METHOD: staged}
# Methods that are read but not written.
READ_ONLY = {
    "auto-round": auto_round_config,
    "fp8": fp8_config,
    **dict.fromkeys(modelopt_config.METHODS, modelopt_config),
    "quark": quark_config,
    "bitsandbytes": bitsandbytes_config,
    "torchao": torchao_config,
    "hqq": hqq_config,
    "gguf": gguf_block,
}
# Files that hold the block if config.json does not, and their method.
SECOND_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    modelopt_config.SECOND_FILE: "modelopt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig(ConfigFields):
    """Quantization of a checkpoint's linears, as stated in the keys of `method`."""

    method: str = "gptq"
    # results of scheme_for: readers ask for each linear several times, and rules are many
    _found: dict[str, Scheme | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.method == "gptq" and not self.zeros:
            object.__setattr__(self, "zeros", gptq_config.zeros_rule(self.scheme.weight))
        if not self.layout:
            object.__setattr__(self, "layout", self.method)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> "QuantConfig":
        """Read the block. Raises CheckpointError, naming the key, if it cannot be loaded."""
        if not isinstance(block, dict):
            raise CheckpointError(
                BLOCK, f"expected a JSON object, found {type(block).__name__}", COPY_BLOCK
            )
        method = block.get("quant_method")
        known = WRITTEN | READ_ONLY
        if not isinstance(method, str) or method not in known:
            form = unread_methods.describe(method, block.keys())
            raise CheckpointError(
                f"{BLOCK}.quant_method",
                f"{method!r:.60} {form}"
                if form
                else f"expected one of {', '.join(known)}, found {method!r:.60}",
                unread_methods.REMEDY,
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
        """Make the config of a checkpoint whose linears have these schemes; None: float.

        `schemes` names every linear except a float head. Raises CheckpointError if the method
        cannot express it.
        """
        unrounded = compressed_config.unrounded(schemes.values())
        if unrounded:
            stored = compressed_config.stored
            schemes = {name: each and stored(each) for name, each in schemes.items()}
        main, others = split_schemes(schemes)
        if main is None:
            raise CheckpointError(
                "checkpoint",
                "none of its linears is quantized",
                "leave fewer linears in float (`ignore`)",
            )
        return cls(
            method=method,
            scheme=WRITTEN[method].stored(main),
            rules=WRITTEN[method].rules_for(schemes, others),
            lm_head=schemes.get(HEAD) is not None,
            quantizer=quantizer,
            zeros=zeros,
            kv_cache=kv_cache,
            act_order=act_order,
            kv_per_head=kv_per_head,
            unrounded_inputs=unrounded,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the block that vLLM, SGLang and transformers read (see formats/README.md)."""
        return WRITTEN[self.method].write(self)

    @property
    def narrow_inputs(self) -> str:
        """Return the first scheme with inputs under 8 bits, which no kernel supports; or ""."""
        return next((str(each) for each in self.schemes if _is_narrow(each)), "")

    def with_activation_bits(
        self, bits: int | None, *, may_be_unused: bool = False
    ) -> "QuantConfig":
        """Return the config with 8- or 16-bit inputs instead of 4-bit inputs.

        Raises InputError if there are 4-bit inputs and `bits` is None. Without 4-bit inputs, `bits`
        must be None, unless it `may_be_unused`.
        """
        narrow = self.narrow_inputs
        if not narrow:
            if bits is not None and not may_be_unused:
                raise InputError(
                    "--activation-bits",
                    "expected only with a checkpoint whose activations have 4 bits, found"
                    f" {self.schemes[0] if self.schemes else 'float linears'}",
                    "leave it out",
                )
            return self
        if bits is None:
            raise CheckpointError(
                BLOCK,
                f"states 4-bit integer activations ({narrow}), for which there is no kernel",
                "give --activation-bits 8 or 16 to run it with wider ones, which changes its"
                " outputs a little",
            )
        rules = tuple(replace(rule, scheme=_widened(rule.scheme, bits)) for rule in self.rules)
        reason = "4-bit int" if bits == 16 else self.unrounded_inputs
        scheme = _widened(self.scheme, bits)
        return replace(self, scheme=scheme, rules=rules, unrounded_inputs=reason)

    @property
    def schemes(self) -> list[Scheme]:
        """Return all schemes in use, the main one first."""
        named = (self.scheme, *(rule.scheme for rule in self.rules))
        return [scheme for scheme in named if scheme is not None]

    def scheme_for(self, module: str) -> Scheme | None:
        """Return the scheme of a module; None: it stays in float.

        The input embedding has a scheme only if a rule names it.
        """
        if module not in self._found:
            self._found[module] = self._scheme_of(module)
        return self._found[module]

    def _scheme_of(self, module: str) -> Scheme | None:
        if module == HEAD and not self.lm_head:
            return None
        rule = first_match(self.rules, module)
        if rule is None and module == EMBEDDING:
            return None
        return self.scheme if rule is None else rule.scheme


def _is_narrow(scheme: Scheme | None) -> bool:
    return scheme is not None and scheme.activation is not None and scheme.activation.bits < 8


def _widened(scheme: Scheme | None, bits: int) -> Scheme | None:
    if not _is_narrow(scheme):
        return scheme
    return replace(scheme, activation=replace(scheme.activation, bits=8) if bits == 8 else None)


def second_file(folder: Path) -> str:
    """Return the file that holds the block if config.json has none; empty: there is none."""
    return next((name for name in SECOND_FILES if (folder / name).is_file()), "")


def find_block(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the quantization block of config.json or of a second file; None: there is none.

    It is None for MXFP4: no linear is quantized, and the family's row names its tensors.
    """
    block = config.get(BLOCK)
    if isinstance(block, dict) and block.get("quant_method") == mxfp4.METHOD:
        return None
    if isinstance(block, dict) and block.get("quant_method") in modelopt_config.METHODS:
        return modelopt_config.completed(folder, block)
    if block is not None:
        return block
    file_name = second_file(folder)
    if not file_name:
        return None
    return {"quant_method": SECOND_FILES[file_name], **read_json(folder / file_name)}
