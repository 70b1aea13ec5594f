"""config.json as the model needs it. transformers fills in defaults. Knows no tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from formats.bare_model import INSTEAD_OF_HEAD, SCORE, is_headless
from formats.checkpoint import CONFIG, CheckpointReader, read_json
from formats.errors import InputError, one_line
from formats.families import FAMILIES, served_architectures
from formats.family import Family, check_num_layers
from formats.quant_config import BLOCK, QuantConfig, find_block
from formats.text_part import has_text_part
from qserve.model.context_length import ContextLength
from qserve.model.filled_config import filled_config
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
    ropes: tuple[RopeConfig | None, ...]  # of each layer; None: it rotates nothing
    context: ContextLength
    tied_head: bool
    windows: tuple[int | None, ...]  # of each layer: keys a query sees, itself included
    state_layers: tuple[bool, ...]  # those with a state in place of keys and values
    dtype: torch.dtype  # that the checkpoint states
    quant: QuantConfig | None  # None: a float checkpoint
    eos_token_ids: frozenset[int]
    instead_of_head: str = ""  # what the checkpoint has: a classifier's matrix, or nothing
    labels: tuple[str, ...] = ()  # of a classifier

    def check_length(self, max_model_len: int) -> None:
        """Raise InputError for positions that the rotation of some layer cannot have."""
        for rope in self.ropes:
            if rope is not None:
                rope.check_length(max_model_len)

    @property
    def has_states(self) -> bool:
        """Whether requests have states beside their pages."""
        return any(self.state_layers)

    @property
    def longest_window(self) -> int | None:
        """Keys that a query sees in the layer where it sees most; None: all."""
        return None if None in self.windows else max(self.windows)

    @property
    def sizes(self) -> dict[str, int | None]:
        """The numbers that shapes of the family's row name."""
        return self.family.sizes({**self.values, "head_dim": self.head_dim})

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json. Raises InputError."""
        raw = read_json(Path(folder) / CONFIG)
        # Only the tensors tell what there is in place of a head.
        may_lack_head = is_headless(raw) or (Path(folder) / "modules.json").exists()
        if has_text_part(raw) or may_lack_head:
            raw = CheckpointReader(folder).config
        check_num_layers(raw)
        block = find_block(Path(folder), raw)
        family = family_of(raw)
        try:
            # The block is ours to read: transformers would look for the library that wrote it.
            plain = {key: value for key, value in raw.items() if key != BLOCK}
            config = SimpleNamespace(**filled_config(plain))
        except Exception as error:  # what a config class raises is not documented
            problem = f"transformers refuses it: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None
        try:
            return cls._from_config(family, config, raw, block, Path(folder))
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            problem = f"cannot be used: {type(error).__name__}: {one_line(error)}"
            raise InputError(f"{folder}/{CONFIG}", problem) from None

    @classmethod
    def _from_config(
        cls,
        family: Family,
        config: Any,
        raw: Mapping[str, Any],
        block: dict | None,
        folder: Path,
    ) -> "ModelConfig":
        """The same, of transformers' config, config.json as it is, and the quantization block."""
        activation = getattr(config, family.activation_key)
        if activation != family.activation:
            raise InputError(
                f"config.json {family.activation_key}",
                f"expected {family.activation!r}, found {activation!r}",
            )
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        windows = _windows(config, family.window)
        ropes = _ropes(config, family, head_dim, windows)
        return cls(
            family=family,
            values=vars(config),
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=config.rms_norm_eps,
            ropes=ropes,
            context=ContextLength.of(raw, config.max_position_embeddings, ropes),
            tied_head=bool(config.tie_word_embeddings),
            windows=windows,
            state_layers=tuple(
                family.has_state(number, vars(config)) for number in range(config.num_hidden_layers)
            ),
            dtype=_dtype(config.dtype),
            quant=QuantConfig.from_dict(block) if block else None,
            eos_token_ids=_eos_token_ids(folder, config),
            instead_of_head=raw.get(INSTEAD_OF_HEAD, ""),
            labels=_labels(config) if raw.get(INSTEAD_OF_HEAD) == SCORE else (),
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


def _labels(config: Any) -> tuple[str, ...]:
    """A classifier's labels, in the order of their rows."""
    named = getattr(config, "id2label", None) or {}
    return tuple(str(named[key]) for key in sorted(named, key=int))


def _dtype(name: str | None) -> torch.dtype:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _windows(config: Any, kind: str) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if kind == "all":
        return (window,) * config.num_hidden_layers
    if kind == "layer_types":
        return tuple(window if t == "sliding_attention" else None for t in config.layer_types)
    return (None,) * config.num_hidden_layers


def _ropes(
    config: Any, family: Family, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[RopeConfig | None, ...]:
    """Of each layer. transformers states one for all, or one for each type of layer."""
    stated = config.rope_parameters
    by_type = stated if any(isinstance(value, dict) for value in stated.values()) else None
    ropes = []
    for number, window in enumerate(windows):
        if family.rope == "no_rope_layers":
            rotates = bool(config.no_rope_layers[number])  # 1: it does rotate
        else:
            rotates = family.rope == "all" or config.sliding_window is None or window is not None
        parameters = by_type[config.layer_types[number]] if by_type else stated
        rope = RopeConfig.from_dict(
            parameters,
            dim=head_dim,
            max_position=config.max_position_embeddings,
            interleaved=family.interleaved_rope,
        )
        ropes.append(rope if rotates else None)
    return tuple(ropes)


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
