"""Encoders: functions that call transformers' vision tower and projector.

Suffixes of tensor names:

    N: tiles or images of one call
    P: squares or patches of an image
    V: values of a patch
    M: embeddings of one item
    C: channels, or the hidden size of the text model
    H, W: height, width
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from qserve.multimodal.image_processors.phi4 import overview, patch_mask

# name of a feature -> its tensors, one for each item of the call
Inputs = Mapping[str, list[torch.Tensor]]
# transformers' model and the inputs of items of equal shapes -> embeddings [M, C] of each item
Encode = Callable[[Any, Inputs], Sequence[torch.Tensor]]


def _encode_tiles(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of Idefics3 or SmolVLM.

    This does not call get_image_features, which would take a tile of zeros for padding.
    """
    return model.connector(_tile_states(model, inputs)[0])


def _encode_resampled(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of Idefics2, of any size."""
    states, mask_NHW = _tile_states(model, inputs)
    return model.connector(states, attention_mask=mask_NHW.flatten(1))


def _tile_states(model: Any, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tower's output for tiles without padding, and the mask of their patches."""
    pixels_NCHW = torch.stack(inputs["pixel_values"])
    count, _, height, width = pixels_NCHW.shape
    size = model.config.vision_config.patch_size
    mask_NHW = torch.ones(
        (count, height // size, width // size), dtype=torch.bool, device=pixels_NCHW.device
    )
    found = model.vision_model(pixels_NCHW, patch_attention_mask=mask_NHW)
    return found.last_hidden_state, mask_NHW


def _encode_square(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the squares of LLaVA, InternVL or Gemma 3."""
    return model.get_image_features(torch.stack(inputs["pixel_values"])).pooler_output


def _encode_prompt_squares(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the squares of PaliGemma: all images of a prompt are one item."""
    pixels_NPCHW = torch.stack(inputs["pixel_values"])
    rows = model.get_image_features(pixels_NPCHW.flatten(0, 1)).pooler_output
    return rows.unflatten(0, pixels_NPCHW.shape[:2]).flatten(1, 2)


def _encode_rows(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the images of Mistral 3 or Pixtral, which have any size."""
    pixels_NCHW, count = torch.stack(inputs["pixel_values"]), len(inputs["pixel_values"])
    if count == 1 and pixels_NCHW.shape[2] * pixels_NCHW.shape[3] == _side(model) ** 2:
        # Where one image has one embedding, transformers drops the first dimension: two do not.
        pixels_NCHW = pixels_NCHW.expand(2, -1, -1, -1)
    sizes = torch.tensor([pixels_NCHW.shape[2:]] * len(pixels_NCHW), device=pixels_NCHW.device)
    return model.get_image_features(pixels_NCHW, image_sizes=sizes).pooler_output[:count]


def _side(model: Any) -> int:
    """Return the side in pixels of the square that becomes one embedding."""
    return model.config.vision_config.patch_size * getattr(model.config, "spatial_merge_size", 1)


def _encode_squares(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the squares of LLaVA-NeXT or LLaVA-OneVision."""
    pixels_NPCHW, sizes_N2 = (torch.stack(inputs[name]) for name in ("pixel_values", "image_sizes"))
    count, squares = pixels_NPCHW.shape[:2]
    others = {}
    if squares == 1:  # stated as images of one prompt with several, also where there is one image
        others["batch_num_images"] = torch.tensor([count + 1])
    return model.get_image_features(pixels_NPCHW, image_sizes=sizes_N2, **others).pooler_output


def _encode_patches(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the patches of GLM."""
    patches, grids_N3 = torch.cat(inputs["pixel_values"]), torch.stack(inputs["image_grid_thw"])
    return model.get_image_features(patches, image_grid_thw=grids_N3).pooler_output


def _encode_square_patches(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the patches of PaddleOCR-VL, [channels, rows, columns] each."""
    patches, grids_N3 = torch.cat(inputs["pixel_values"]), torch.stack(inputs["image_grid_thw"])
    size = model.config.vision_config.patch_size
    return model.get_image_features(patches.unflatten(1, (-1, size, size)), grids_N3).pooler_output


def _encode_single_patches(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the patches of VideoLLaMA 3, each of which has an embedding."""
    patches, grids_N3 = torch.cat(inputs["pixel_values"]), torch.stack(inputs["image_grid_thw"])
    return model.get_image_features(
        patches, grids_N3, torch.ones_like(grids_N3[:, 0])
    ).pooler_output


def _encode_pooled(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the patches of Gemma 4, also of 12B, which have no padding here."""
    pixels_NCPV, columns_N1 = (
        torch.stack(inputs["pixel_values"]),
        torch.stack(inputs["image_grid"])[:, 1:],
    )
    numbers_P = torch.arange(pixels_NCPV.shape[2], device=pixels_NCPV.device)
    places_NP2 = torch.stack([numbers_P % columns_N1, numbers_P // columns_N1], -1)
    patches_NPV = pixels_NCPV.permute(0, 2, 3, 1).flatten(2)
    return model.get_image_features(patches_NPV, places_NP2).pooler_output


def _encode_any_size(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of LFM2-VL, without the padding that get_image_features needs."""
    pixels_NCHW = torch.stack(inputs["pixel_values"])
    patches_NPV, rows, columns = _patches(pixels_NCHW, model.config.vision_config.patch_size)
    states_NPC = model.vision_tower(
        pixel_values=patches_NPV.permute(0, 1, 3, 4, 2).flatten(2),
        spatial_shapes=torch.tensor([[rows, columns]] * len(patches_NPV)),
        pixel_attention_mask=patches_NPV.new_ones(patches_NPV.shape[:2], dtype=torch.int32),
    ).last_hidden_state
    return model.multi_modal_projector(states_NPC.unflatten(1, (rows, columns))).flatten(1, 2)


def _patches(pixels_NCHW: torch.Tensor, size: int) -> tuple[torch.Tensor, int, int]:
    """Cut images into patches [N, P, C, size, size], row by row.

    Return them and the numbers of rows and columns.
    """
    rows, columns = (side // size for side in pixels_NCHW.shape[2:])
    cut = pixels_NCHW.unflatten(3, (columns, size)).unflatten(2, (rows, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2), rows, columns


def _encode_llama4(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of Llama 4."""
    states_NMC = model.vision_model(torch.stack(inputs["pixel_values"])).last_hidden_state
    return model.multi_modal_projector(states_NMC)


def _encode_kimi(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the images of Kimi-K2.5, all of one size."""
    pixels_NCHW = torch.stack(inputs["pixel_values"])
    patches, rows, columns = _patches(pixels_NCHW, model.config.vision_config.patch_size)
    grids_N3 = torch.tensor([[1, rows, columns]] * len(patches), device=patches.device)
    return model.get_image_features(patches.flatten(0, 1), grids_N3).pooler_output


def _encode_muse(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the images of Muse Glimmer, whose patches have several equal frames."""
    vision = model.config.vision_config
    patches, rows, columns = _patches(torch.stack(inputs["pixel_values"]), vision.patch_size)
    grids_N3 = torch.tensor([[1, rows, columns]] * len(patches), device=patches.device)
    frames = patches.flatten(2).repeat(1, 1, vision.patch_temporal)
    return model.get_image_features(frames.flatten(0, 1), grids_N3).pooler_output


def _encode_step(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of Step-3.7, all of one size."""
    states_NMC = model.vision_model(torch.stack(inputs["pixel_values"])).last_hidden_state
    return model.multi_modal_projector(states_NMC)


def _encode_radio(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode images of Nemotron Nano Omni, all of one size.

    Models with MTP layers normalize the tower's output, without weights.
    """
    pixels_NCHW, vision = torch.stack(inputs["pixel_values"]), model.config.vision_config
    states_NPC = model.vision_model(pixels_NCHW).features
    if model.config.text_config.num_nextn_predict_layers:
        width = states_NPC.shape[-1:]
        states_NPC = torch.nn.functional.layer_norm(states_NPC, width, eps=vision.layer_norm_eps)
    rows, columns = (side // vision.patch_size for side in pixels_NCHW.shape[2:])
    return model.project_vision_features(states_NPC, rows, columns)


def _encode_phi4(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the tiles of Phi-4-multimodal and the overview of each image.

    The call of transformers writes its embeddings over those of image tokens.
    """
    embed, found = model.embed_tokens_extend.image_embed, []
    vision = model.config.vision_config
    for tiles_TCHW, grid_4 in zip(inputs["pixel_values"], inputs["image_grid"], strict=True):
        rows, columns, high, wide = grid_4.tolist()
        mask = patch_mask((rows, columns), (high, wide), vision.image_size // vision.patch_size)
        whole_CHW, size = overview(tiles_TCHW, (rows, columns)), vision.crop_size
        side = -(-mask.shape[1] // 2)
        count = side * (side + 1) + 1
        pooled_HW = mask[1:, ::2, ::2].view(rows, columns, side, side)
        count += int(pooled_HW[:, 0, :, 0].sum() * (pooled_HW[0, :, 0].sum() + 1))
        ids_1M = torch.full((1, count), vision.image_token_id, device=tiles_TCHW.device)
        found.append(
            embed(
                ids_1M,
                tiles_TCHW.new_zeros(1, count, model.config.hidden_size),
                torch.cat([whole_CHW[None], tiles_TCHW])[None],
                image_sizes=torch.tensor([[rows * size, columns * size]]),
                image_attention_mask=mask[None].to(tiles_TCHW.device),
            )[0]
        )
    return found


def _encode_slices(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the slices of MiniCPM-V, whose patches are side by side in one row."""
    pixels_NCHW = torch.stack(inputs["pixel_values"])
    patches, rows, columns = _patches(pixels_NCHW, model.config.vision_config.patch_size)
    row_CHW = patches.permute(2, 3, 0, 1, 4).flatten(2)
    sizes_N2 = torch.tensor([[rows, columns]] * len(patches), device=patches.device)
    return model.get_image_features(row_CHW[None], sizes_N2).pooler_output


def _encode_views(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Encode the overview and the tiles of DeepSeek-OCR's images."""
    tiles, others = inputs["pixel_values_local"], {}
    if len(tiles[0]):
        counts = [len(each) for each in tiles]
        others = {"pixel_values_local": torch.cat(tiles), "num_local_patches": counts}
    if hasattr(model, "image_newline"):
        others["patches_grid"] = [each.tolist()[::-1] for each in inputs["image_grid"]]
    return model.get_image_features(torch.stack(inputs["pixel_values"]), **others).pooler_output


ENCODERS: dict[str, Encode] = {
    "tiles": _encode_tiles,
    "resampled": _encode_resampled,
    "square": _encode_square,
    "squares": _encode_squares,
    "prompt_squares": _encode_prompt_squares,
    "patches": _encode_patches,
    "single_patches": _encode_single_patches,
    "square_patches": _encode_square_patches,
    "rows": _encode_rows,
    "pooled": _encode_pooled,
    "any_size": _encode_any_size,
    "llama4": _encode_llama4,
    "kimi": _encode_kimi,
    "muse": _encode_muse,
    "step": _encode_step,
    "radio": _encode_radio,
    "phi4": _encode_phi4,
    "views": _encode_views,
    "slices": _encode_slices,
}
