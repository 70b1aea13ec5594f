"""Writer of a trained head's folder, in the layout of its authors or of speculators."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import CheckpointWriter
from formats.errors import CheckpointError
from formats.heads import tensors as names
from formats.heads.config import (
    IMAGES_KEY,
    NESTED,
    ORIGINAL,
    SPECULATORS,
    TAPS_KEY,
    EagleConfig,
    MedusaConfig,
)
from formats.heads.folder import HeadFolder

DEFAULT_DRAFT_TOKENS = 3
CONFIG_VERSION = "0.9.0"  # version of speculators whose keys these are


def eagle3_config(config: EagleConfig, layout: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a head. `verifier`: the target's config.json with its `name_or_path`.

    `config.stated_taps` counts the layers before a state, as speculators does. Flat configs name
    the layer whose output it is. The default states are not written in either layout.
    """
    taps = list(config.stated_taps)
    flags: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
    }
    if config.image_embeddings is not None:
        flags[IMAGES_KEY] = config.image_embeddings
    values = {**config.values, "num_hidden_layers": config.num_layers}
    if layout == ORIGINAL:
        stated = {"eagle_config": {TAPS_KEY: [tap - 1 for tap in taps]}} if taps else {}
        return {**values, "architectures": ["LlamaForCausalLMEagle3"], **flags, **stated}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": CONFIG_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": DEFAULT_DRAFT_TOKENS}
            ],
            "verifier": {
                "name_or_path": str(verifier.get("name_or_path", "")),
                "architectures": verifier.get("architectures", []),
            },
        },
        NESTED: values,
        TAPS_KEY: taps,
        **flags,
    }


def save_eagle3(
    folder: str | Path,
    config: EagleConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str,
    verifier: Mapping[str, Any],
) -> None:
    """Write canonical `tensors` as a new folder, and read it back. Raises CheckpointError."""
    first = "midlayer" if layout == ORIGINAL else names.FIRST_LAYER
    with CheckpointWriter(folder) as writer:
        for name, tensor in tensors.items():
            below = name.removeprefix(f"{names.FIRST_LAYER}.")
            writer.add(name if below == name else f"{first}.{below}", tensor)
        writer.seal(eagle3_config(config, layout, verifier), side_files_from=writer.staging)
        num_layers = verifier["num_hidden_layers"]
        if HeadFolder(writer.staging).config.taps(num_layers) != config.taps(num_layers):
            raise CheckpointError(
                f"taps {list(config.stated_taps)}",
                "readers of a flat config would take them for the usual ones, counted otherwise",
                "choose others",
            )
        writer.publish()


def save_medusa(
    folder: str | Path, config: MedusaConfig, tensors: Mapping[str, torch.Tensor], target: str
) -> None:
    """Write Medusa's heads as a new folder, and read it back. Raises CheckpointError."""
    stated = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": target,
    }
    with CheckpointWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        staged = writer.seal(stated, side_files_from=writer.staging)
        (staged / "model.safetensors").rename(staged / "medusa_lm_head.safetensors")
        HeadFolder(staged)
        writer.publish()


LAYOUTS = (ORIGINAL, SPECULATORS)
