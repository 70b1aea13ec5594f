"""Convert tensors of InternVLChatModel's tower and projector to those of transformers' InternVL.

Stored queries, keys and values of a layer are one tensor.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_IN_LAYER = re.compile(r"(vision_tower)\.encoder\.layers\.(\d+)\.(.+)")
_QKV = re.compile(r"attn\.qkv\.(weight|bias)")
# prefix of a name after the layer's number -> prefix in the model; the first match counts
_LAYER_PARTS = {
    "attn.proj.": "attention.projection_layer.",
    "attn.": "attention.",
    "norm1.": "layernorm_before.",
    "norm2.": "layernorm_after.",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
# prefix of a name outside of the layers -> prefix in the model
_OTHER_PARTS = {
    "vision_tower.embeddings.class_embedding": "vision_tower.embeddings.cls_token",
    "vision_tower.embeddings.position_embedding": "vision_tower.embeddings.position_embeddings",
    "vision_tower.embeddings.patch_embedding.": (
        "vision_tower.embeddings.patch_embeddings.projection."
    ),
    "multi_modal_projector.0.": "multi_modal_projector.layer_norm.",
    "multi_modal_projector.1.": "multi_modal_projector.linear_1.",
    "multi_modal_projector.3.": "multi_modal_projector.linear_2.",
}


def internvl_tensors(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any], layers: str = "encoder.layer"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the model that a stored tensor becomes.

    `layers`: name of the layers in transformers' tower.
    """
    found = _IN_LAYER.fullmatch(name)
    if found is None:
        yield _renamed(name, _OTHER_PARTS), tensor
        return
    stem, part = f"{found[1]}.{layers}.{found[2]}", found[3]
    fused = _QKV.fullmatch(part)
    if fused is None:
        yield f"{stem}.{_renamed(part, _LAYER_PARTS)}", tensor
        return
    for own, rows in zip("qkv", tensor.chunk(3), strict=True):
        yield f"{stem}.attention.{own}_proj.{fused[1]}", rows


def _renamed(name: str, prefixes: Mapping[str, str]) -> str:
    prefix = next((each for each in prefixes if name.startswith(each)), None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)
