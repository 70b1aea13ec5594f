"""config.json as the model needs it. transformers fills in defaults. Knows no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from formats.checkpoint import CONFIG, read_json
from formats.errors import InputError, one_line
from formats.families import FAMILIES, Family, check_num_layers, served_architectures
from formats.quant_config import BLOCK, QuantConfig, find_block
from qserve.model.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and choices of one decoder."""

    family: Family
    values: Mapping[str, Any]  # config.json's, and transformers' where it states none
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tied_head: bool
    windows: tuple[int | None, ...]  # of each layer: keys a query sees, itself included
    dtype: torch.dtype  # that the checkpoint states
    quant: QuantConfig | None  # None: a float checkpoint
    eos_token_ids: frozenset[int]

    @property
    def sizes(self) -> dict[str, int | None]:
        """The numbers that shapes of the family's row name."""
        return self.family.sizes({**self.values, "head_dim": self.head_dim})

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises InputError."""
        raw = read_json(Path(folder) / CONFIG)
        check_num_layers(raw)
        block = find_block(Path(folder), raw)
        family = family_of(raw)
        try:
            # The block is ours to read: transformers would look for the library that wrote it.
            plain = {key: value for key, value in raw.items() if key != BLOCK}
            config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        except Exception as error:  # what a config class raises is not documented
            problem = f"transformers refuses it: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None
        try:
            return cls._from_config(family, config, block, Path(folder))
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot be used: {type(error).__name__}: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None

    @classmethod
    def _from_config(
        cls, family: Family, config: Any, block: dict | None, folder: Path
    ) -> "ModelConfig":
        """The same, of transformers' config and the quantization block."""
        activation = getattr(config, family.activation_key)
        if activation != family.activation:
            raise InputError(
                f"config.json {family.activation_key}",
                f"expected {family.activation!r}, found {activation!r}",
            )
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        max_position = config.max_position_embeddings
        return cls(
            family=family,
            values=config.to_dict(),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            rope=RopeConfig.from_dict(
                config.rope_parameters, dim=head_dim, max_position=max_position
            ),
            max_position=max_position,
            tied_head=bool(config.tie_word_embeddings),
            windows=_windows(config, family.window),
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
            quant=QuantConfig.from_dict(block) if block else None,
            eos_token_ids=_eos_token_ids(folder, config),
        )


def family_of(config: Mapping[str, Any]) -> Family:
    """The row that config.json names. Raises InputError where there is none that is served."""
    names, served = config.get("architectures"), served_architectures()
    for name in served:
        if names == [name]:
            return FAMILIES[name]
    raise InputError(
        "config.json architectures",
        f"expected one of {', '.join(served)}, found {names!r:.200}",
        "a new family is a row of formats/families.py and a module of qserve/model/families",
    )


def _windows(config: Any, kind: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if kind == "all":
        return (window,) * config.num_hidden_layers
    if kind == "layer_types":
        return tuple(window if t == "sliding_attention" else None for t in config.layer_types)
    return (None,) * config.num_hidden_layers


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    """The end tokens: generation_config.json's, which chat models rely on, and config.json's.

    Some models name -1, or ids beyond the vocabulary; these are never drawn. Raises InputError.
    """
    found: list[int] = []
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    for value in (generation.get("eos_token_id"), config.eos_token_id):
        if value is not None:
            found += value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in found):
        raise InputError(f"{folder} eos_token_id", f"expected token ids, found {found!r:.100}")
    return frozenset(token for token in found if 0 <= token < config.vocab_size)
