"""Decide from the tensors whether the output head is tied to the embedding.

Fine-tuned and merged models may keep `tie_word_embeddings` although they store a head that differs
from the embedding. Such a head is used, as in transformers 5 and vLLM.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch

from formats.families import family_of

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIE = "tie_word_embeddings"
ROWS = 4096  # rows per comparison


class StoredTensor(Protocol):
    """Tensor of a checkpoint that is read by rows (checkpoint.TensorEntry)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


_Entry = TypeVar("_Entry", bound=StoredTensor)


def says_tied(config: Mapping[str, Any]) -> bool:
    """Return True if config.json, or else the family's default, states a tied head."""
    family = family_of(config)
    return config.get(TIE, family is not None and family.tied) is True


def settle_head(
    config: dict[str, Any], entries: dict[str, _Entry]
) -> tuple[dict[str, Any], dict[str, _Entry]]:
    """Return config.json and the tensors, with the tie flag corrected by the tensors.

    If the flag is set but the head is not a copy of the embedding, `tie_word_embeddings` becomes
    false. A quantized head is not a copy. If only the head is stored, it is used as the embedding.
    Reads both matrices up to their first difference. Raises CheckpointError if a matrix cannot be
    read.
    """
    if not says_tied(config):
        return config, entries
    family = family_of(config)
    embedding, weight = (EMBEDDING, HEAD) if family is None else (family.embedding, family.head)
    stem = weight.removesuffix("weight")
    has_embedding = any(name.startswith(embedding.removesuffix("weight")) for name in entries)
    head = {n for n in entries if n.startswith(stem) and not n.endswith(".bias")}
    if not has_embedding and head == {weight}:
        renamed = {embedding if name == weight else name: each for name, each in entries.items()}
        return config, renamed
    if not head or (
        head == {weight} and embedding in entries and _same(entries[embedding], entries[weight])
    ):
        return config, entries
    return {**config, TIE: False}, entries


def _same(left: StoredTensor, right: StoredTensor) -> bool:
    """Return True if head and embedding contain the same numbers."""
    is_float = left.dtype.is_floating_point and right.dtype.is_floating_point
    if left.shape != right.shape or len(left.shape) != 2 or not is_float:
        return False
    for start in range(0, left.shape[0], ROWS):
        stop = min(start + ROWS, left.shape[0])
        first, second = left.rows(start, stop), right.rows(start, stop)
        if left.dtype != right.dtype:
            first, second = first.double(), second.double()
        if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
            return False
    return True
