"""Convert tensors of Step-3.7's tower, whose queries, keys and values are one tensor.

Rotated channels are adjacent in the files; transformers' model has them in two halves.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from formats.errors import COPY_CONFIG, CheckpointError

# parts of names in the files -> in transformers' model
_PARTS = {
    ".conv1.": ".embeddings.patch_embedding.",
    ".positional_embedding": ".embeddings.position_embedding.weight",
    ".transformer.resblocks.": ".layers.",
    ".ln_pre.": ".pre_layernorm.",
    ".vit_downsampler": ".downsampler",
    ".ls_1.gamma": ".lambda_1",
    ".ls_2.gamma": ".lambda_2",
    ".mlp.c_fc.": ".mlp.fc1.",
    ".mlp.c_proj.": ".mlp.fc2.",
    ".attn.": ".self_attn.",
    ".ln_1.": ".layernorm_before.",
    ".ln_2.": ".layernorm_after.",
}
_FUSED = ".in_proj_"


def step_tensors(
    name: str, tensor: torch.Tensor, values: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of transformers' model. Raises CheckpointError."""
    for stored, own in _PARTS.items():
        name = name.replace(stored, own)
    module, fused, field = name.partition(_FUSED)
    if not fused:
        yield name, tensor
        return
    heads = values["vision_config"]["num_attention_heads"]
    if not tensor.numel() or len(tensor) % (3 * 2 * heads):
        raise CheckpointError(
            name,
            f"expected queries, keys and values of {heads} heads, found {list(tensor.shape)}",
            COPY_CONFIG,
        )
    for letter, rows in zip("qkv", tensor.chunk(3), strict=True):
        if letter != "v":
            rows = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        yield f"{module}.{letter}_proj.{field}", rows
