"""Open the folder of a GGUF file: config.json, and entries of its tensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from formats.architecture.stored_form.config import canonical_config
from formats.codecs.config_fields import BLOCK
from formats.families import FAMILIES
from formats.files.tensor_entry import TensorEntry
from formats.gguf.block_types import BY_NAME
from formats.gguf.entries import make_entries, make_scalars, schemes_of
from formats.gguf.folder import read_index
from formats.in_memory.k_weight import is_in_blocks
from formats.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedGguf:
    """Configuration and tensors of a GGUF file."""

    config: dict[str, Any]
    entries: dict[str, TensorEntry]
    summary: str  # how many linears of each type run on codes, and how many as floats


def open_gguf(
    folder: Path, config: Mapping[str, Any], *, as_floats: bool, rounded: bool, in_blocks: bool
) -> OpenedGguf:
    """Return config.json and entries.

    Raises CheckpointError if the GGUF file is missing or changed.

    `as_floats`: no linear has codes. `rounded`: floats have the dtype of config.json. `in_blocks`
    False: types that otherwise stay in blocks (KWeight) become floats.
    """
    index, config = read_index(folder), canonical_config(dict(config))
    family = FAMILIES[config["architectures"][0]].variant(config)
    schemes = schemes_of(index.presented, family)
    on_codes = [
        name
        for name, scheme in schemes.items()
        if scheme is not None and not as_floats and (in_blocks or not is_in_blocks(scheme.weight))
    ]
    types = Counter(
        (index.presented[f"{name}.weight"].stored.type.name, scheme)
        for name, scheme in schemes.items()
    )
    dtype = getattr(torch, str(config.get("dtype")), None) if rounded else None
    return OpenedGguf(
        config={key: value for key, value in config.items() if key != BLOCK or not as_floats},
        entries={
            **make_entries(index.presented, on_codes, float_dtype=dtype),
            **make_scalars(index.scalars, index.path),
        },
        summary=_summary(index.path, types),
    )


def _summary(path: Path, types: Mapping[tuple[str, Scheme | None], int]) -> str:
    """Return a line on how many linears of each type run on codes, and how many as floats."""
    parts = []
    for (name, scheme), count in types.items():
        if scheme is not None:
            as_scheme = f" ({scheme})" if str(scheme) != name.lower() else ""
            parts.append(f"{count} {name} run packed{as_scheme}")
        elif not BY_NAME[name].float_dtype:
            parts.append(f"{count} {name} are dequantized at load")
        else:
            parts.append(f"{count} {name}")
    return f"{path}: linears: {', '.join(parts)}"
