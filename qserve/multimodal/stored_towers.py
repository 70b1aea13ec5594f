"""Convert tensors of vision towers from stored files to transformers' model.

Most towers need only another prefix (VisionFamily.prefixes). Kimi's are stored with fused queries,
keys and values, whose rotated channels are adjacent; transformers' model has them in two halves.

Suffixes of tensor names: Q rows of queries, K inputs.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from formats.errors import COPY_CONFIG, CheckpointError
from qserve.multimodal.stored_forms.internvl_tensors import internvl_tensors
from qserve.multimodal.stored_forms.nemotron import nemotron_tensors
from qserve.multimodal.stored_forms.step_tensors import step_tensors

# name after the prefix is replaced, tensor, config.json's values -> names and tensors of the model
Convert = Callable[[str, torch.Tensor, Mapping[str, Any]], Iterator[tuple[str, torch.Tensor]]]

_IN_LAYER = re.compile(r"vision_tower\.encoder\.blocks\.(\d+)\.(.+)\.(weight|bias)")
_LAYER_PARTS = {
    "norm0": "norm1",
    "norm1": "norm2",
    "mlp.fc0": "mlp.fc1",
    "mlp.fc1": "mlp.fc2",
    "wo": "attn.proj",
}
# prefix of a tensor outside of the layers -> prefix in the model
_OTHER_PARTS = {
    "vision_tower.encoder.final_layernorm.": "vision_tower.final_layernorm.",
    "vision_tower.patch_embed.pos_emb.weight": (
        "vision_tower.patch_embed.pos_emb.position_embeddings"
    ),
    "mm_projector.proj.0.": "mm_projector.in_proj.",
    "mm_projector.proj.2.": "mm_projector.out_proj.",
    "mm_projector.linear_1.": "mm_projector.in_proj.",
    "mm_projector.linear_2.": "mm_projector.out_proj.",
}


# names in Microsoft's files of Phi-4-multimodal -> in transformers
_PHI_4_PARTS = {
    ".image_embed.img_projection.0.": ".image_embed.img_projection_up.",
    ".image_embed.img_projection.2.": ".image_embed.img_projection_down.",
    ".image_embed.glb_GN": ".image_embed.global_img_feature_extensor",
    ".image_embed.sub_GN": ".image_embed.sub_img_feature_extensor",
}


# names in Qwen3-Omni's mergers -> in Qwen3-VL's
_OMNI_PARTS = {
    ".merger_list.": ".deepstack_merger_list.",
    ".ln_q.": ".norm.",
    ".mlp.0.": ".linear_fc1.",
    ".mlp.2.": ".linear_fc2.",
}


# names in Tencent's files of HunyuanOCR -> in transformers
_HUNYUAN_PARTS = {
    ".mlp.dense_h_to_4h.": ".mlp.fc1.",
    ".mlp.dense_4h_to_h.": ".mlp.fc2.",
    ".input_layernorm.": ".layer_norm1.",
    ".post_attention_layernorm.": ".layer_norm2.",
    ".perceive.proj.0.": ".perceive.proj_conv.",
    ".perceive.proj.2.": ".perceive.proj_out.",
    ".perceive.": ".patch_merger.",
}


# names in Baidu's files of ERNIE 4.5 VL's resampler -> in transformers
_ERNIE_PARTS = {
    "_linear.0.": "_linear.fc1.",
    "_linear.2.": "_linear.fc2.",
    "_linear.3.": "_linear.ln.",
}


# names in Liquid's files of LFM3-VL's tower -> in transformers
_LFM_3_PARTS = {
    ".patchifier.": ".patch_embed.",
    ".q_layernorm.": ".q_norm.",
    ".k_layernorm.": ".k_norm.",
}


# tensors of PaddleOCR-VL's tower that no code uses
_UNUSED_BY_PADDLE = (".packing_position_embedding.", ".vision_model.head.")


_SAM_LAYER = re.compile(r"blocks\.(\d+)\.(norm(?=[12]))?")
# names in SAM's part of DeepSeek-OCR -> in transformers
_SAM_PARTS = {
    "patch_embed.proj.": "patch_embed.projection.",
    "neck.0.": "neck.conv1.",
    "neck.1.": "neck.layer_norm1.",
    "neck.2.": "neck.conv2.",
    "neck.3.": "neck.layer_norm2.",
    "net_2.": "proj.conv1.",
    "net_3.": "proj.conv2.",
}
_SAM, _ENCODER = "vision_tower.sam_encoder.", "vision_tower.vision_encoder."
_UNUSED_BY_DEEPSEEK = "embeddings.patch_embedding."


def _as_stored(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, tensor


def _kimi(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        prefix = next((each for each in _OTHER_PARTS if name.startswith(each)), None)
        yield (
            name if prefix is None else _OTHER_PARTS[prefix] + name.removeprefix(prefix),
            tensor,
        )
        return
    number, part, field = found.groups()
    stem = f"vision_tower.layers.{number}"
    if part != "wqkv":
        yield f"{stem}.{_LAYER_PARTS.get(part, part)}.{field}", tensor
        return
    heads = values["vision_config"]["num_attention_heads"]
    if not tensor.numel() or not tensor.ndim or len(tensor) % (3 * 2 * heads):
        raise CheckpointError(
            name,
            f"expected queries, keys and values of {heads} heads, found {list(tensor.shape)}",
            COPY_CONFIG,
        )
    queries, keys, own_values = tensor.chunk(3)
    yield f"{stem}.attn.q_proj.{field}", _in_halves(queries, heads)
    yield f"{stem}.attn.k_proj.{field}", _in_halves(keys, heads)
    yield f"{stem}.attn.v_proj.{field}", own_values


def _renamed(
    parts: Mapping[str, str], name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace parts of the name."""
    for stored, own in parts.items():
        name = name.replace(stored, own)
    yield name, tensor


def _deepseek_ocr(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename SAM's tensors, and split queries, keys and values of CLIP's layers."""
    if name.startswith(_SAM):
        part = name.removeprefix(_SAM)
        part = next(
            (o + part.removeprefix(s) for s, o in _SAM_PARTS.items() if part.startswith(s)), part
        )
        part = _SAM_LAYER.sub(lambda m: f"layers.{m[1]}.{'layer_norm' if m[2] else ''}", part)
        yield _SAM + part, tensor
        return
    part = name.removeprefix(_ENCODER)
    if part.startswith(_UNUSED_BY_DEEPSEEK):
        return
    if part.startswith("transformer."):
        name = f"{_ENCODER}encoder.{part.removeprefix('transformer.')}"
    if ".qkv_proj." not in name:
        yield name, tensor
        return
    for own, rows in zip("qkv", tensor.chunk(3), strict=True):
        yield name.replace(".qkv_proj.", f".{own}_proj."), rows


def _paddle(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    if not any(part in name for part in _UNUSED_BY_PADDLE):
        yield name, tensor


def _in_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Move the even channels of each head before the odd ones, in a weight [Q, K] or bias [Q]."""
    return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


CONVERSIONS: dict[str, Convert] = {
    "": _as_stored,
    "kimi": _kimi,
    "internvl": internvl_tensors,
    "nemotron": nemotron_tensors,
    "step": step_tensors,
    "phi4": partial(_renamed, _PHI_4_PARTS),
    "paddle": _paddle,
    "deepseek_ocr": _deepseek_ocr,
    "omni": partial(_renamed, _OMNI_PARTS),
    "ernie": partial(_renamed, _ERNIE_PARTS),
    "hunyuan": partial(_renamed, _HUNYUAN_PARTS),
    "lfm3": partial(_renamed, _LFM_3_PARTS),
    "qianfan": partial(internvl_tensors, layers="layers"),
}
