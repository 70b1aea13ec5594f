"""config.json as the model needs it. transformers fills in defaults. Knows no tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from formats.checkpoint import CONFIG, read_json
from formats.errors import InputError, one_line
from formats.quant_config import BLOCK, QuantConfig, find_block
from qserve.model.architectures import Architecture, architecture_of
from qserve.model.rope import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and choices of one decoder."""

    architecture: str
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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer: keys a query sees, itself included
    dtype: torch.dtype  # that the checkpoint states
    quant: QuantConfig | None  # None: a float checkpoint
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises InputError."""
        raw = read_json(Path(folder) / CONFIG)
        block = find_block(Path(folder), raw)
        name, family = architecture_of(raw)
        try:
            # The block is ours to read: transformers would look for the library that wrote it.
            plain = {key: value for key, value in raw.items() if key != BLOCK}
            config = AutoConfig.for_model(plain.pop("model_type"), **plain)
        except Exception as error:  # what a config class raises is not documented
            problem = f"transformers refuses it: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None
        try:
            return cls._from_config(name, family, config, block, Path(folder))
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot be used: {type(error).__name__}: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None

    @classmethod
    def _from_config(
        cls, name: str, family: Architecture, config: Any, block: dict | None, folder: Path
    ) -> "ModelConfig":
        """The same, of transformers' config and the quantization block."""
        if config.hidden_act != "silu":
            raise InputError(
                "config.json hidden_act", f"expected 'silu', found {config.hidden_act!r}"
            )

        def flag(value: bool | str) -> bool:
            return bool(getattr(config, value, False)) if isinstance(value, str) else value

        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        max_position = config.max_position_embeddings
        return cls(
            architecture=name,
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
            qkv_bias=flag(family.qkv_bias),
            o_bias=flag(family.o_bias),
            mlp_bias=flag(family.mlp_bias),
            qk_norm=family.qk_norm,
            windows=_windows(config, family.window),
            dtype=config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16,
            quant=QuantConfig.from_dict(block) if block else None,
            eos_token_ids=_eos_token_ids(folder, config),
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
