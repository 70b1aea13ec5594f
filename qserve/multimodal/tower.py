"""Tower: transformers' vision tower and projector of a model, with the checkpoint's weights.

Legend: N tiles or images of one call, M embeddings of one item, C hidden size of the text model.
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from formats.errors import CheckpointError
from formats.files.tensor_entry import TensorEntry
from formats.table import names_text
from qserve.multimodal.families import VisionConfig, VisionFamily
from qserve.multimodal.media import MediaItem
from qserve.multimodal.processor import load_image_processor

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
    """LLaVA."""
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


def _encode_grid(model: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
    """Qwen. After an embedding come the rows that are added after the first layers."""
    found = model.get_image_features(
        torch.cat(inputs["pixel_values"]), torch.stack(inputs["image_grid_thw"])
    )
    counts = [len(rows) for rows in found.pooler_output]
    added = (
        # before transformers 5.18 a level is one tensor of all items
        level.split(counts) if isinstance(level, torch.Tensor) else level
        for level in getattr(found, "deepstack_features", None) or ()
    )
    return [torch.cat(rows, -1) for rows in zip(found.pooler_output, *added, strict=True)]


ENCODERS: dict[str, Encode] = {
    "tiles": _encode_tiles,
    "square": _encode_square,
    "grid": _encode_grid,
    "rows": _encode_rows,
}
# Values of the pixels of one call, unless one item has more: bounds the memory of activations.
# 21 tiles of 512 x 512, or 5 images of 1024 x 1024.
MAX_VALUES = 2**24


class Tower(torch.nn.Module):
    """The vision part of a model, which turns items into embeddings."""

    def __init__(
        self, config: VisionConfig, model: Any, normalizer: "Normalizer", dtype: torch.dtype
    ) -> None:
        """`model`: transformers' whole model; its text part is unused."""
        super().__init__()
        self.config, self.normalizer, self.dtype = config, normalizer, dtype
        self.model = model

    @classmethod
    def load(
        cls,
        config: VisionConfig,
        folder: str | Path,
        entries: Mapping[str, TensorEntry] | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> "Tower":
        """Build the tower. `entries`: its tensors by stored name; None: random weights.

        Raises InputError.
        """
        model = _without_text(config, is_random=entries is None)
        if entries is not None:
            _fill_(model, config.family, entries, str(folder))
        model = model.to(device=device, dtype=dtype).requires_grad_(False)
        model.eval()
        return cls(config, model, Normalizer.of(load_image_processor(folder), device), dtype)

    @property
    def workspace_bytes(self) -> int:
        """Estimate of the memory of one call: the activations of a layer, and the pixels."""
        vision = self.config.values["vision_config"]
        hidden = vision["hidden_size"]
        values_of_patch = 3 * vision["patch_size"] ** 2 * vision.get("temporal_patch_size", 1)
        # the stream, norm, queries, keys, values, their rotation, output; twice the feed-forward
        of_patch = 10 * hidden + 2 * vision.get("intermediate_size", 4 * hidden)
        num_patches = MAX_VALUES // values_of_patch
        return self.dtype.itemsize * (num_patches * of_patch + 2 * MAX_VALUES) + 16 * MAX_VALUES

    @property
    def device(self) -> torch.device:
        return self.normalizer.mean.device

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """Return the embeddings [M, C] of each item."""
        groups: dict[tuple, list[int]] = {}
        for index, item in enumerate(items):
            shapes = tuple((each.name, each.shape) for each in item.features)
            groups.setdefault(shapes, []).append(index)
        found: dict[int, torch.Tensor] = {}
        for indices in groups.values():
            size = max(len(each.data) for each in items[indices[0]].features)
            count = max(1, MAX_VALUES // size)
            for start in range(0, len(indices), count):
                chosen = indices[start : start + count]
                rows = self._encode_alike([items[index] for index in chosen])
                found.update(zip(chosen, rows, strict=True))
        return [found[index] for index in range(len(items))]

    def _encode_alike(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        """Encode items whose features have equal shapes, in one call."""
        inputs: dict[str, list[torch.Tensor]] = {}
        for item in items:
            for feature in item.features:
                tensor = torch.from_numpy(feature.array().copy()).to(self.device)
                if feature.dtype == "uint8":
                    tensor = self.normalizer(tensor).to(self.dtype)
                inputs.setdefault(feature.name, []).append(tensor)
        return ENCODERS[self.config.family.encoder](self.model, inputs)


class Normalizer:
    """The last step of an image processor: bytes to numbers, as transformers computes it."""

    def __init__(self, factor: float, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.factor, self.mean, self.std = factor, mean, std

    @classmethod
    def of(cls, processor: Any, device: torch.device) -> "Normalizer":
        """Read the options of a transformers image processor."""
        factor = processor.rescale_factor if processor.do_rescale else 1.0
        mean, std = [0.0] * 3, [1.0] * 3
        if processor.do_normalize:
            mean, std = processor.image_mean, processor.image_std
        return cls(factor, *(torch.tensor(each, device=device)[:, None] for each in (mean, std)))

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """`pixels`: uint8, with the channels in the first dimension, or as parts of the last."""
        if pixels.ndim == 2:  # rows of patches, each with its channels one after the other
            return self._normalized(pixels.unflatten(1, (len(self.mean), -1))).flatten(1)
        return self._normalized(pixels.flatten(1)).view(pixels.shape)

    def _normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        # The product in float64, as in transformers: another rounding is another pixel.
        return ((pixels.double() * self.factor).float() - self.mean) / self.std


def _without_text(config: VisionConfig, *, is_random: bool) -> Any:
    """Return transformers' model with one text layer.

    Without `is_random` its weights are not initialized.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.initialization import no_init_weights

    values = copy.deepcopy(dict(config.values))
    text = values["text_config"]
    text["num_hidden_layers"] = 1
    for key in ("layer_types", "mlp_only_layers"):
        if text.get(key):
            text[key] = text[key][:1] if key == "layer_types" else []
    filled = AutoConfig.for_model(values.pop("model_type"), **values)
    with contextlib.nullcontext() if is_random else no_init_weights():
        return AutoModel.from_config(filled, dtype=torch.float32)


def _fill_(
    model: torch.nn.Module, family: VisionFamily, entries: Mapping[str, TensorEntry], folder: str
) -> None:
    """Copy a checkpoint's tensors to the vision part. Raises CheckpointError."""
    prefixes = family.prefixes
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.startswith(tuple(prefixes.values()))
    }
    missing = dict.fromkeys(state)
    with torch.no_grad():
        for stored, entry in entries.items():
            prefix = next((each for each in prefixes if stored.startswith(each)), None)
            if prefix is None:
                continue
            name = prefixes[prefix] + stored.removeprefix(prefix)
            if name.endswith("position_ids"):  # a constant, which older files hold
                continue
            if name not in state:
                raise CheckpointError(
                    stored,
                    "is a tensor that the vision tower does not have",
                    "copy config.json from the original model",
                )
            if tuple(entry.shape) != tuple(state[name].shape):
                raise CheckpointError(
                    stored, f"expected {list(state[name].shape)}, found {list(entry.shape)}"
                )
            state[name].copy_(entry.read())
            missing.pop(name, None)
    if missing:
        raise CheckpointError(
            names_text(sorted(missing)),
            f"tensors of the vision tower are missing from {folder}",
            "quantize the whole model again, or copy them from the original model",
        )
