"""VisionLanguageWriter: writes a vision-language checkpoint around a new text model.

The text model's tensors get their names in the source, the vision part is copied from the source,
and config.json is the source's with the changes of the text model.
"""

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from formats.architecture.stored_form.config import replaced_keys
from formats.architecture.stored_form.fused_qkv import APART, FUSED, LAYOUT
from formats.architecture.text_part import (
    LLM_CONFIG,
    TEXT_CONFIG,
    THINKER_CONFIG,
    other_part_names,
    stored_block,
    stored_name,
    text_prefix,
)
from formats.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    CheckpointReader,
    CheckpointWriter,
)
from formats.codecs.config_fields import BLOCK
from formats.files.target import check_has_space, check_is_free
from formats.scheme import Scheme

TIED = "tie_word_embeddings"


def open_writer(
    folder: str | Path,
    source: CheckpointReader,
    *,
    min_bytes: int,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
) -> CheckpointWriter:
    """Return a writer for a model in the form of `source`.

    `min_bytes`: lower bound of the bytes to write. Raises CheckpointError; DiskError if the disk
    has fewer free.
    """
    check_is_free(folder)
    check_has_space(folder, min_bytes)
    if source.other_parts:
        return VisionLanguageWriter(folder, source, max_shard_bytes=max_shard_bytes)
    return CheckpointWriter(
        folder,
        max_shard_bytes=max_shard_bytes,
        transposed=source.transposed,
        as_stated=replaced_keys(source.whole_config),
    )


def min_bytes(source: CheckpointReader, schemes: Mapping[str, Scheme | None]) -> int:
    """Return a lower bound of a quantized model's bytes: codes, and the tensors that stay."""
    total = sum(entry.num_bytes for entry in source.other_parts.values())
    for name, entry in source.entries.items():
        scheme = schemes.get(name.removesuffix(".weight"))
        size = (
            entry.num_bytes if scheme is None else math.prod(entry.shape) * scheme.weight.bits // 8
        )
        total += min(size, entry.num_bytes)
    return total


class VisionLanguageWriter(CheckpointWriter):
    """Receives the tensors and config.json of a text model; writes the whole model."""

    def __init__(self, folder: str | Path, source: CheckpointReader, *, max_shard_bytes: int):
        super().__init__(folder, max_shard_bytes=max_shard_bytes)
        self._source = source
        self._prefix = text_prefix(entry.name for entry in source.entries.values())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue a tensor of the text model."""
        super().add(stored_name(name, self._prefix), tensor)

    def seal(self, config: dict[str, Any], *, side_files_from: Path) -> Path:
        """Copy the other parts, then write the same files as the text model's writer."""
        for name, entry in self._source.other_parts.items():
            super().add(name, entry.read())
        return super().seal(self._whole(config), side_files_from=side_files_from)

    def write_json(self, name: str, value: dict[str, Any]) -> None:
        """Add a JSON file; a quantization block gets the names of the whole model."""
        super().write_json(name, self._block(value) if "quant_method" in value else value)

    def _block(self, block: dict[str, Any]) -> dict[str, Any]:
        return stored_block(block, self._prefix, other_part_names(self._source.other_parts))

    def _whole(self, config: dict[str, Any]) -> dict[str, Any]:
        whole, before = copy.deepcopy(self._source.whole_config), self._source.config
        holder = whole.get(THINKER_CONFIG, whole)
        text = holder.get(TEXT_CONFIG, holder.get(LLM_CONFIG, holder))
        for key, value in config.items():
            if key == BLOCK:
                whole[BLOCK] = self._block(value)
            elif before.get(key) != value:
                text[key] = value
                if key == TIED:
                    whole[key] = value
        if whole.get(LAYOUT) == FUSED:  # the reader presents them apart
            whole[LAYOUT] = APART
        return whole
