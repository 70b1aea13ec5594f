"""Writer of a trained head's folder, in the original layout or that of speculators."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from formats.checkpoint import CheckpointWriter
from formats.errors import CheckpointError
from formats.heads import tensors as names
from formats.heads.block_config import (
    DFLASH,
    FLAT_AUX_KEY,
    INNER,
    NESTED_AUX_KEY,
    BlockConfig,
)
from formats.heads.config import AUX_LAYERS_KEY, IMAGES_KEY, PEAGLE, EagleConfig, MedusaConfig
from formats.heads.folder import HeadFolder
from formats.heads.layers_config import NESTED, ORIGINAL, SPECULATORS

DEFAULT_DRAFT_TOKENS = 3
CONFIG_VERSION = "0.9.0"  # version of speculators whose keys are written


def eagle3_config(config: EagleConfig, layout: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a head. `verifier`: the target's config.json with its `name_or_path`.

    `config.explicit_aux_layers` counts the layers before a state, as speculators does. Flat configs
    name the layer whose output the state is. The default layers are not written in either layout.
    """
    aux_layers = list(config.explicit_aux_layers)
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
    if config.kind == PEAGLE:
        flags["mask_token_id"] = config.mask_token_id
    if layout == ORIGINAL:
        if config.kind == PEAGLE:
            flags["ptd_token_id"] = flags.pop("mask_token_id")
        flat = [layer - 1 for layer in aux_layers]
        stated = {"eagle_config": {AUX_LAYERS_KEY: flat}} if aux_layers else {}
        return {**values, "architectures": ["LlamaForCausalLMEagle3"], **flags, **stated}
    architecture = "PEagleDraftModel" if config.kind == PEAGLE else "Eagle3DraftModel"
    return {
        **_speculators(config.kind, architecture, DEFAULT_DRAFT_TOKENS, verifier),
        NESTED: values,
        AUX_LAYERS_KEY: aux_layers,
        **flags,
    }


def block_config(config: BlockConfig, layout: str, verifier: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a DFlash or DSpark head. `verifier`: as for `eagle3_config`.

    `config.explicit_aux_layers` counts the layers before a state, as speculators does.
    """
    is_dflash = config.kind == DFLASH
    shared: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
    }
    sizes: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sample_from_anchor": config.samples_anchor,
    }
    if not is_dflash:
        sizes |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_type,
            "enable_confidence_head": bool(config.confidence_inputs),
            "confidence_head_with_markov": config.confidence_inputs > config.hidden_size,
        }
    values = {**config.values, "num_hidden_layers": config.num_layers}
    aux_layers = list(config.explicit_aux_layers)
    if layout == ORIGINAL:
        shared[FLAT_AUX_KEY] = [layer - 1 for layer in aux_layers]
        flat = {**values, "num_target_layers": verifier.get("num_hidden_layers"), **sizes}
        if is_dflash:
            return {**flat, "architectures": ["DFlashDraftModel"], INNER: shared}
        return {**flat, "architectures": ["Qwen3DSparkModel"], **shared}
    architecture = "DFlashDraftModel" if is_dflash else "DSparkDraftModel"
    return {
        **_speculators(config.kind, architecture, config.max_drafts, verifier),
        NESTED: values,
        NESTED_AUX_KEY: aux_layers,
        **shared,
        **sizes,
    }


def _speculators(
    kind: str, architecture: str, num_drafts: int, verifier: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys that speculators writes for every kind."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": CONFIG_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_drafts}],
            "verifier": {
                "name_or_path": str(verifier.get("name_or_path", "")),
                "architectures": verifier.get("architectures", []),
            },
        },
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
        written = HeadFolder(writer.staging).config
        if written.aux_layers(num_layers) != config.aux_layers(num_layers):
            raise CheckpointError(
                f"auxiliary layers {list(config.explicit_aux_layers)}",
                "readers of a flat config would mistake these layers for the default ones",
                "choose other layers",
            )
        writer.publish()


def save_block(
    folder: str | Path,
    config: BlockConfig,
    tensors: Mapping[str, torch.Tensor],
    *,
    layout: str,
    verifier: Mapping[str, Any],
) -> None:
    """Write a DFlash or DSpark head as a new folder, and read it back. Raises CheckpointError."""
    with CheckpointWriter(folder) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.seal(block_config(config, layout, verifier), side_files_from=writer.staging)
        HeadFolder(writer.staging)
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
