"""Drafters: what proposes tokens, in two kinds, and the table of them.

A host drafter reads token ids that the host knows: its requests wait for the tokens of a step
before the next is planned. A device drafter runs behind the model in the same step, on the device,
and reads the model's hidden states; its drafts stay there, so a step may be in flight.

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
    """Proposes from token ids. Knows no tensors."""

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow; `token_ids` are prompt and output so far."""

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request ended: forget it, or learn from its output."""


class DeviceDrafter(Protocol):
    """Proposes behind the model's own pass, in the same step."""

    # Layers before which the model's residual stream (x + residual, not normed) is read: DraftStep
    # has a tensor [T, C] for each, from Decoder.forward_tapped(token_ids_T, step, caches, taps) ->
    # (hidden_TC, tapped). (): none.
    taps: tuple[int, ...]
    # Its layers with keys and values, in order. Each gets pages of the same numbers as the model's
    # (one allocator, the same block tables) with its own heads: DraftStep.caches[i].
    attentions: tuple[Attention, ...]
    # Whether its keys at a position depend on the token after it: then the last page of a cached
    # prefix, whose next token may be another one, is computed again.
    looks_ahead: bool

    def propose(self, step: DraftStep) -> torch.Tensor:
        """Draft step.num_drafts tokens for each request that drafts: int64 [D, K], of the model's
        vocabulary.

        First writes the drafter's keys of all the step's rows, from the true states: also where an
        earlier draft wrote others. Called in every step, also with D = 0 (amid a prompt), where it
        writes the keys and returns [0, K].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a drafter is built with."""

    config: SpeculativeConfig
    target: Decoder  # whose embedding and head it may share; target.config is its ModelConfig
    target_folder: str
    device: torch.device
    dtype: torch.dtype  # of activations
    max_model_len: int
    block_size: int  # tokens of one KV page
    kernels: Any = None  # asked for or forbidden by name, as loader.load takes them
    ranks: Ranks = ALONE  # over which the target is shared out
    dummy_seed: int | None = None  # of weights at random, where the target's are


# method -> "module:function": HostDrafter from SpeculativeConfig, DeviceDrafter from BuildContext.
# Imported when asked for.
HOST_DRAFTERS = {
    "ngram": "qserve.speculation.ngram:NgramDrafter",
    "suffix": "qserve.speculation.suffix:SuffixDrafter",
}
DEVICE_DRAFTERS = {
    "draft_model": "qserve.speculation.draft_model:build",
    "eagle": "qserve.speculation.heads.eagle:build",
    "eagle3": "qserve.speculation.heads.eagle3:build",
    "medusa": "qserve.speculation.heads.medusa:build",
    "mtp": "qserve.speculation.heads.mtp:build",
}


def build_host_drafter(config: SpeculativeConfig) -> HostDrafter | None:
    """None where the method is a device drafter's."""
    path = HOST_DRAFTERS.get(config.method)
    return None if path is None else _load(path)(config)


def build_device_drafter(context: BuildContext) -> DeviceDrafter | None:
    """None where the method is a host drafter's. Raises InputError or CheckpointError."""
    path = DEVICE_DRAFTERS.get(context.config.method)
    return None if path is None else _load(path)(context)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
