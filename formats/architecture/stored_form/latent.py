"""Families with latent attention: widths of latents, layers with indexers and experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.family import MAX_LAYERS
from formats.architecture.rows.latent_parts import AFTER_EXPERTS
from formats.architecture.sizes import is_size
from formats.architecture.stored_form.parts import expert_layers, known_sizes
from formats.files.tensor_entry import ComputedEntry, TensorEntry, header_of

# RoPE of Sarvam 105B if config.json states none
SARVAM_YARN = {
    **{"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def query_rank(default: int | None) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that fills in the width of queries' latents; null means no latents."""
    return lambda config: {} if "q_lora_rank" in config else {"q_lora_rank": default}


def glm_lite(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**query_rank(768)(config), **expert_layers(config)}


def selecting(rank: int, heads: int) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that fills in transformers' defaults for attention that selects keys."""

    def derive(config: Mapping[str, Any]) -> dict[str, Any]:
        first = config.get("first_k_dense_replace", 3)
        return {
            **query_rank(rank)(config),
            **expert_layers({**config, "first_k_dense_replace": first}),
            "index_topk": config.get("index_topk", 2048),
            "index_n_heads": config.get("index_n_heads", heads),
            "index_head_dim": config.get("index_head_dim", 128),
            **_indexer_types(config),
        }

    return derive


def _indexer_types(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return which layers of GLM-5 have an indexer, from the keys of its files."""
    count, pattern = config.get("num_hidden_layers"), config.get("index_topk_pattern")
    if config.get("indexer_types") is not None or config.get("model_type") != "glm_moe_dsa":
        return {}
    if isinstance(pattern, str):
        return {"indexer_types": ["full" if kind == "F" else "shared" for kind in pattern]}
    if isinstance(pattern, list):
        return {"indexer_types": pattern}
    every, first = config.get("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    if not (is_size(count) and type(every) is int and type(first) is int):
        return {}
    kinds = ("full", "shared")
    layers = range(min(count, MAX_LAYERS))
    own = [max(layer - first + 1, 0) % max(every, 1) for layer in layers]
    return {"indexer_types": [kinds[bool(each)] for each in own]}


def axk1(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return transformers' defaults of groups of experts, and the layers that have experts."""
    return {
        **query_rank(1536)(config),
        **expert_layers(config),
        "n_group": config.get("n_group", 8),
        "topk_group": config.get("topk_group", 4),
    }


def axk1_entries(config: Mapping[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of A.X K1 with corrections of routers, and only the norms that are used.

    Published files have no corrections, which are then 0, and norms after dense feed-forwards,
    which no code uses.
    """
    kinds, found = config.get("mlp_layer_types"), dict(entries)
    for number, kind in enumerate(kinds if isinstance(kinds, list) else ()):
        prefix = f"model.layers.{number}."
        router, correction = (
            f"{prefix}mlp.gate.{leaf}" for leaf in ("weight", "e_score_correction_bias")
        )
        if kind == "dense":
            found.pop(f"{prefix}{AFTER_EXPERTS}.weight", None)
        elif isinstance(entries.get(router), TensorEntry) and correction not in entries:
            stated = {"name": correction, "shape": entries[router].shape[:1]}
            found[correction] = Zeros(**{**header_of(entries[router]), **stated})
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Zeros(ComputedEntry):
    """A tensor that no file has. `file`, `offset` and `num_bytes` are of another tensor."""

    def read(self) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(self.shape, dtype=self.dtype)


def sarvam(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSeek-V3's keys for Sarvam 105B, and the defaults of its code.

    config.json does not state the groups of experts: each has 8, and a token's experts come from
    two of them.
    """
    count, rotated = config.get("num_experts"), config.get("qk_rope_head_dim", 64)
    found: dict[str, Any] = {
        **query_rank(None)(config),
        "n_shared_experts": config.get("num_shared_experts", 1),
        "topk_group": config.get("topk_group", 2),
        "routed_scaling_factor": config.get("routed_scaling_factor", 2.5),
        "first_k_dense_replace": config.get("first_k_dense_replace", 1),
        "rope_interleave": True,
        **known_sizes(num_key_value_heads=config.get("num_attention_heads")),
        "head_dim": rotated,  # published files state the width of a cache entry
        "qk_rope_head_dim": rotated,
    }
    if is_size(count):
        found["n_group"] = config.get("n_group", max(count // 8, 1))
    stated = [key for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None]
    for key in stated or ["rope_scaling"]:
        rope = config[key] if stated else SARVAM_YARN
        if isinstance(rope, Mapping):
            found[key] = {k: "yarn" if v == "deepseek_yarn" else v for k, v in rope.items()}
    return found


def minicpm3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the divisor of logits, and the widths that transformers fills in."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    found = query_rank(768)(config)
    base = config.get("dim_model_base", 256) or hidden
    if is_size(hidden) and is_size(base):
        found["logits_divisor"] = hidden / base
    if config.get("v_head_dim") is None and is_size(hidden) and is_size(heads):
        found["v_head_dim"] = hidden // heads
    return found
