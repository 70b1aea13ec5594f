"""Interfaces of host drafters and device drafters, and the table of methods.

A host drafter reads token ids on the host. So the tokens of a step must arrive before the next step
is planned. A device drafter runs on the device, in the same step after the model, and reads the
model's hidden states. Its drafts stay on the device, so steps can overlap.

Suffixes of tensor names: T tokens of the step, D requests that draft, K drafts.
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
        """Return up to `most` tokens that may follow `token_ids` (prompt and output so far)."""

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Note that a request has finished: forget it, or learn from its output."""


class DeviceDrafter(Protocol):
    """Proposes draft tokens on the device, after the model's forward pass in the same step."""

    # Indices of the model's layers whose inputs the drafter reads as auxiliary hidden states (the
    # residual stream x + residual, before the norm). DraftStep has a tensor [T, C] for each, from
    # Decoder.forward_with_aux(token_ids_T, step, caches, aux_layers) -> (hidden_TC, aux_states).
    # (): none.
    aux_layers: tuple[int, ...]
    # The drafter's attention layers, in order. They use the model's page numbers (one allocator,
    # the same block tables); layer i has its keys and values in DraftStep.caches[i].
    attentions: tuple[Attention, ...]
    # This rank's first KV head of each of them, with which engines of different tensor parallelism
    # exchange pages; None: not known, so that pages are not exchanged.
    first_kv_heads: tuple[int, ...] | None
    # True if the drafter's keys at a position depend on the next token. Then the last page of a
    # cached prefix is recomputed, since the next token may differ.
    looks_ahead: bool
    # True if the drafter reads embeddings of images, instead of their placeholder token.
    reads_images: bool
    # Number of rows that the drafter runs in addition to those of the newest token and of all
    # drafts but the last. DraftStep.draft_positions includes them.
    extra_positions: int

    def propose(self, step: DraftStep) -> torch.Tensor:
        """Return step.num_drafts draft tokens per request, int64 [D, K], in the model's vocabulary.

        First, write the drafter's keys for all rows of the step from the model's true states. They
        overwrite keys that earlier drafts wrote. This method is called in every step. Within a
        prompt D is 0: then it writes the keys and returns [0, K].
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Inputs for building a drafter."""

    config: SpeculativeConfig
    target: Decoder  # the drafter may share its embedding and head; has a ModelConfig
    target_folder: str
    tokenizer_folder: str  # folder with the target's tokenizer.json
    device: torch.device
    dtype: torch.dtype  # dtype of activations
    max_model_len: int
    block_size: int  # tokens per KV page
    kernels: Any = None  # kernels required or forbidden by name, as for loader.load
    ranks: Ranks = ALONE  # ranks of the target
    activation_bits: int | None = None  # bits to use instead of 4-bit activations
    dummy_seed: int | None = None  # seed of random weights, if the target has random weights


# Method -> "module:function", imported on demand. The function takes a SpeculativeConfig (host) or
# a BuildContext (device), and returns the drafter.
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
    """Build the host drafter; return None for methods with a device drafter."""
    path = HOST_DRAFTERS.get(config.method)
    return None if path is None else _load(path)(config)


def build_device_drafter(context: BuildContext) -> DeviceDrafter | None:
    """Build the device drafter; return None for methods with a host drafter.

    Raises InputError or CheckpointError.
    """
    path = DEVICE_DRAFTERS.get(context.config.method)
    return None if path is None else _load(path)(context)


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
