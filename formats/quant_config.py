"""config.json's `quantization_config` <-> QuantConfig. Knows keys and values, not tensors."""

from dataclasses import dataclass, field
from typing import Any

from formats.errors import CheckpointError
from formats.scheme import QuantSpec, Scheme

BLOCK = "quantization_config"
REQUIRED_KEYS = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantConfig:
    """What a GPTQ checkpoint says of its quantized linears. Which those are, its tensors tell."""

    scheme: Scheme
    quantizer: str = ""  # "tool:version" of the writer
    method: str = field(default="gptq", init=False)

    @classmethod
    def from_dict(cls, block: dict[str, Any]) -> "QuantConfig":
        """Read the block. Raises CheckpointError, naming the key, on what cannot be loaded."""
        if not isinstance(block, dict):
            raise CheckpointError(BLOCK, f"expected a JSON object, found {type(block).__name__}")
        method = block.get("quant_method")
        if method != "gptq":
            raise CheckpointError(
                f"{BLOCK}.quant_method", f"expected 'gptq', found {method!r}", "convert the model"
            )
        for key in REQUIRED_KEYS:
            if key not in block:
                raise CheckpointError(f"{BLOCK}.{key}", "missing")
        layout = block.get("checkpoint_format", block.get("format", "gptq"))
        if layout != "gptq":
            raise CheckpointError(
                f"{BLOCK}.checkpoint_format", f"expected 'gptq' (v1), found {layout!r}"
            )
        if block["bits"] not in (4, 8):
            raise CheckpointError(f"{BLOCK}.bits", f"expected 4 or 8, found {block['bits']!r}")
        if not isinstance(block["group_size"], int):
            raise CheckpointError(
                f"{BLOCK}.group_size", f"expected a number, found {block['group_size']!r}"
            )
        for key, empty in (("dynamic", {}), ("lm_head", False)):
            if block.get(key, empty) not in (empty, None):
                raise CheckpointError(f"{BLOCK}.{key}", f"not supported, found {block[key]!r}")
        spec = QuantSpec(
            bits=block["bits"], symmetric=bool(block["sym"]), group_size=block["group_size"]
        )
        meta = block.get("meta")
        quantizer = meta.get("quantizer", "") if isinstance(meta, dict) else ""
        return cls(
            scheme=Scheme(weight=spec),
            quantizer=str(quantizer[0] if isinstance(quantizer, list) and quantizer else quantizer),
        )

    def to_dict(self) -> dict[str, Any]:
        """The block that vLLM, SGLang, GPTQModel and transformers read (see formats/README.md)."""
        spec = self.scheme.weight
        return {
            "quant_method": "gptq",
            "bits": spec.bits,
            "group_size": spec.group_size,
            "desc_act": False,
            "sym": spec.symmetric,
            "lm_head": False,
            "checkpoint_format": "gptq",
            "format": "gptq",
            "pack_dtype": "int32",
            "true_sequential": False,
            "meta": {"quantizer": [self.quantizer]} if self.quantizer else {},
        }
