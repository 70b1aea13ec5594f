"""Drafters: the two kinds, and the table of methods.

A host drafter reads token ids on the host: its requests wait for the tokens of a step before the
next one is planned. A device drafter runs after the model in the same step, on the device, and
reads the model's hidden states; its drafts stay there, so steps can overlap.

Legend: T tokens of the step, D requests of it that draft, K drafts, V vocabulary of the model.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from qserve.model.blocks.attention import Attention
from qserve.model.decoder import Decoder
from qserve.parallel.ranks import ALONE, Ranks
from qserve.speculation.config import SpeculativeConfig
from qserve.speculation.draft_step import DraftStep


class HostDrafter(Protocol):
    """Proposes draft tokens from token ids."""

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`: prompt and output so far."""

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Forget a finished request, or learn from its output."""


class DeviceDrafter(Protocol):
    """Proposes after the model's own forward pass, in the same step."""

    # Layers whose input (the residual stream x + residual, before the norm) is read: the auxiliary
    # hidden states. DraftStep has a tensor [T, C] for each, from
    # Decoder.forward_tapped(token_ids_T, step, caches, taps) -> (hidden_TC, tapped). (): none.
    taps: tuple[int, ...]
    # Its layers with keys and values, in order. Each uses the model's page numbers (one allocator,
    # the same block tables) with its own heads: DraftStep.caches[i].
    attentions: tuple[Attention, ...]
    # Whether its keys at a position depend on the next token. Then the last page of a cached
    # prefix, whose next token may differ, is recomputed.
    looks_ahead: bool
    # Whether it reads the embeddings of images instead of their placeholder token's.
    reads_images: bool
    # Rows that it runs after those of the newest token and of all drafts but the last: DraftStep
    # has places for them.
    places_after: int

    def propose(self, step: DraftStep) -> torch.Tensor:
        """Draft step.num_drafts tokens per request, int64 [D, K], in the model's vocabulary.

        First writes the drafter's keys of all the step's rows, from the true states, even where an
        earlier draft wrote others. Called in every step, also with D = 0 (within a prompt), where
        it writes the keys and returns [0, K].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Inputs for building a drafter."""

    config: SpeculativeConfig
    target: Decoder  # its embedding and head may be shared; target.config is its ModelConfig
    target_folder: str
    tokenizer_folder: str  # of the target, with its tokenizer.json
    device: torch.device
    dtype: torch.dtype  # of activations
    max_model_len: int
    block_size: int  # tokens of one KV page
    kernels: Any = None  # kernels required or forbidden by name, as for loader.load
    ranks: Ranks = ALONE  # ranks of the target
    activation_bits: int | None = None  # what 4-bit activations run with
    dummy_seed: int | None = None  # seed of random weights, if the target's are random


# method -> "module:function": HostDrafter from SpeculativeConfig, DeviceDrafter from BuildContext.
# Imported on demand.
HOST_DRAFTERS = {
    "ngram": "qserve.speculation.ngram:NgramDrafter",
    "suffix": "qserve.speculation.suffix:SuffixDrafter",
}
DEVICE_DRAFTERS = {
    "draft_model": "qserve.speculation.draft_model:build",
    "eagle": "qserve.speculation.heads.eagle:build",
    "eagle3": "qserve.speculation.heads.eagle3:build",
    "peagle": "qserve.speculation.heads.parallel:build",
    "dflash": "qserve.speculation.heads.block:build",
    "dspark": "qserve.speculation.heads.block:build",
    "medusa": "qserve.speculation.heads.medusa:build",
    "mtp": "qserve.speculation.heads.mtp:build",
}


def build_host_drafter(config: SpeculativeConfig) -> HostDrafter | None:
    """Build the host drafter, or return None for a device method."""
    path = HOST_DRAFTERS.get(config.method)
    return None if path is None else _load(path)(config)


def build_device_drafter(context: BuildContext) -> DeviceDrafter | None:
    """Build the device drafter, or return None for a host method.

    Raises InputError or CheckpointError.
    """
    path = DEVICE_DRAFTERS.get(context.config.method)
    return None if path is None else _load(path)(context)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
