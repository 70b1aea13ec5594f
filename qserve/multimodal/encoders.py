"""Encoders: how transformers' vision tower and projector are called.

Legend: N tiles or images of one call, P squares of an image, M embeddings of one item, C channels,
or hidden size of the text model, H height, W width.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Arrays of the items of one call, by the name of their feature.
Inputs = Mapping[str, list[torch.Tensor]]
# transformers' model and the inputs of items of equal shapes -> embeddings [M, C] of each item
Encode = Callable[[Any, Inputs], Sequence[torch.Tensor]]


def _encode_tiles(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Idefics3, SmolVLM. Not get_image_features: it takes a tile of zeros for padding."""
    pixels_NCHW = torch.stack(inputs["pixel_values"])
    count, _, height, width = pixels_NCHW.shape
    size = model.config.vision_config.patch_size
    mask = torch.ones(
        (count, height // size, width // size), dtype=torch.bool, device=pixels_NCHW.device
    )
    states = model.vision_model(pixels_NCHW, patch_attention_mask=mask).last_hidden_state
    return model.connector(states)


def _encode_square(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """LLaVA, InternVL."""
    return model.get_image_features(torch.stack(inputs["pixel_values"])).pooler_output


def _encode_rows(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Mistral 3."""
    pixels_NCHW, count = torch.stack(inputs["pixel_values"]), len(inputs["pixel_values"])
    if count == 1 and pixels_NCHW.shape[2] * pixels_NCHW.shape[3] == _side(model) ** 2:
        # transformers drops the first dimension of a single embedding
        pixels_NCHW = pixels_NCHW.expand(2, -1, -1, -1)
    sizes = torch.tensor([pixels_NCHW.shape[2:]] * len(pixels_NCHW), device=pixels_NCHW.device)
    return model.get_image_features(pixels_NCHW, image_sizes=sizes).pooler_output[:count]


def _side(model: Any) -> int:
    """Pixels of a side of the square of an embedding."""
    return model.config.vision_config.patch_size * model.config.spatial_merge_size


def _encode_squares(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """LLaVA-NeXT, LLaVA-OneVision."""
    pixels_NPCHW, sizes_N2 = (torch.stack(inputs[name]) for name in ("pixel_values", "image_sizes"))
    count, squares = pixels_NPCHW.shape[:2]
    others = {}
    if squares == 1:  # as if they were images of one prompt, also where it is one image
        others["batch_num_images"] = torch.tensor([count + 1])
    return model.get_image_features(pixels_NPCHW, image_sizes=sizes_N2, **others).pooler_output


def _encode_patches(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """GLM."""
    patches, grids_N3 = torch.cat(inputs["pixel_values"]), torch.stack(inputs["image_grid_thw"])
    return model.get_image_features(patches, image_grid_thw=grids_N3).pooler_output


def _encode_pooled(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Gemma 4: patches without padding."""
    pixels_NCPV, columns_N1 = (
        torch.stack(inputs["pixel_values"]),
        torch.stack(inputs["image_grid"])[:, 1:],
    )
    numbers_P = torch.arange(pixels_NCPV.shape[2], device=pixels_NCPV.device)
    places_NP2 = torch.stack([numbers_P % columns_N1, numbers_P // columns_N1], -1)
    patches_NPV = pixels_NCPV.permute(0, 2, 3, 1).flatten(2)
    return model.get_image_features(patches_NPV, places_NP2).pooler_output


ENCODERS: dict[str, Encode] = {
    "tiles": _encode_tiles,
    "square": _encode_square,
    "squares": _encode_squares,
    "patches": _encode_patches,
    "rows": _encode_rows,
    "pooled": _encode_pooled,
}
