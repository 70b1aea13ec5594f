"""Cosmos3: the Reasoner inside a unified checkpoint, under the names of transformers' modules.

A published folder has an index whose files are in sub-folders, and the tensors of two models: the
Reasoner, a vision-language model, and a generator of images and videos, whose tensors are dropped.
Names of the Reasoner lack `model.language_model.` and `model.visual.`, and name linears of
attention as diffusers does.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from formats.architecture.family import architecture_of

# Cosmos3 Nano and Super, under vLLM's and transformers' names: Qwen3-VL
OMNI = ("Cosmos3ForConditionalGeneration", "Cosmos3OmniForConditionalGeneration")
EDGE = "Cosmos3EdgeForConditionalGeneration"
QWEN_3_VL = "qwen3_vl"
_TEXT = re.compile(r"(?:model\.)?((?:layers|embed_tokens|norm)\..+)")
_TOWER = re.compile(r"((?:blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\..+)")
_KEPT = ("lm_head.", "model.language_model.", "model.visual.", "model.projector.")
_KEPT += ("visual.", "projector.")
_GENERATOR = re.compile(r"moe_gen|\.(?:add_[qkv]_proj|to_add_out|norm_added_[qk])\.")
_NAMES = {f".to_{part}.": f".{part}_proj." for part in "qkv"}
_NAMES |= {".to_out.": ".o_proj.", ".norm_q.": ".q_norm.", ".norm_k.": ".k_norm."}
_NAMES |= {".mlp.fc1.": ".mlp.up_proj.", ".mlp.fc2.": ".mlp.down_proj."}
Entry = TypeVar("Entry")


def reasoner_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the Reasoner: Qwen3-VL's for Cosmos3 Nano and Super."""
    if architecture_of(config) not in OMNI:
        return config
    vision = config.get("vision_config")
    found = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": QWEN_3_VL}
    if isinstance(vision, Mapping):
        found["vision_config"] = {**vision, "model_type": f"{QWEN_3_VL}_vision"}
    return {**config, **found}


def reasoner_name(name: str) -> str | None:
    """Return a tensor's name in transformers' model of the Reasoner; None: the generator's."""
    if _GENERATOR.search(name):
        return None
    if name.startswith(("model.language_model.", "model.visual.")):
        text = name.startswith("model.language_model.")
    elif found := _TEXT.fullmatch(name):
        name, text = f"model.language_model.{found[1]}", True
    elif found := _TOWER.fullmatch(name):
        return f"model.visual.{found[1]}"
    else:
        return name if name.startswith(_KEPT) else None
    if text:
        for stored, own in _NAMES.items():
            name = name.replace(stored, own)
    return name


def reasoner_entries(entries: dict[str, Entry]) -> dict[str, Entry]:
    """Return the Reasoner's tensors under transformers' names."""
    return {
        own: replace(entry, name=own)
        for name, entry in entries.items()
        if (own := reasoner_name(name)) is not None
    }
