"""Tower: transformers' vision tower and projector of a model, with the checkpoint's weights.

Suffixes of tensor names: M embeddings of one item, C hidden size of the text model.
For other suffixes see qwen_tower.py.
"""

import contextlib
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from formats.architecture.sizes import is_size
from formats.errors import COPY_CONFIG, CheckpointError, one_line
from formats.files.tensor_entry import TensorEntry
from formats.scheme import Scheme
from formats.table import names_text
from qserve.model.loading.finite_check import FiniteCheck
from qserve.multimodal.encoders import ENCODERS
from qserve.multimodal.families import VisionConfig
from qserve.multimodal.image_processors.normalizer import Normalizer
from qserve.multimodal.image_processors.own_processor import normalizer_of
from qserve.multimodal.layouts.layout import side_of
from qserve.multimodal.media import Feature, MediaItem
from qserve.multimodal.processor import load_image_processor
from qserve.multimodal.qwen_tower import QwenTower
from qserve.multimodal.rounded_linear import round_layers_
from qserve.multimodal.stored_towers import CONVERSIONS
from qserve.multimodal.video_processor import VideoProcessor

# Limit of the pixel values of one call, which limits the memory of activations: 21 tiles of 512 x
# 512, or 5 images of 1024 x 1024. A single item may have more.
MAX_VALUES = 2**24
SAM_CONFIG = "sam_config"  # key of vision_config in DeepSeek-OCR
PIXEL_DTYPES = ("uint8", "float32")  # of features with pixels, from 0 to 255
# keys of vision_config with the width of the tower, the first one counts
WIDTHS = ("embed_dim", "hidden_size", "mm_embed_dim")
# keys of vision_config in which transformers accepts numbers below 1
SIZES = {"hidden_size", "num_attention_heads", "num_heads", "num_hidden_layers", "depth"}


class Tower(torch.nn.Module):
    """The vision part of a model, which turns items into embeddings."""

    def __init__(
        self,
        config: VisionConfig,
        model: Any,
        normalizers: Mapping[str, Normalizer],
        dtype: torch.dtype,
        encodes_alone: bool = False,
    ) -> None:
        """Store the parts of the tower.

        `model`: transformers' model without its text part. `normalizers`: kind of media ->
        normalizer. `encodes_alone`: encode each frame in a call of its own, so that the
        bits of its embeddings do not depend on what else a step encodes.
        """
        super().__init__()
        self.encodes_alone = encodes_alone
        self.config, self.normalizers, self.dtype = config, normalizers, dtype
        self.model = model
        # encoder of the "grid" families, which have no row in ENCODERS
        self.of_grids = QwenTower(model.visual) if config.family.encoder == "grid" else None
        # patches of images of one size, rows, columns -> embeddings
        self.encode_grid = None if self.of_grids is None else self.of_grids.encode

    @classmethod
    def load(
        cls,
        config: VisionConfig,
        folder: str | Path,
        entries: Mapping[str, TensorEntry] | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
        encodes_alone: bool = False,
        scheme: str | None = None,
    ) -> "Tower":
        """Load the tower. Raises InputError.

        `entries`: name in the checkpoint -> tensor; None: random weights. `scheme`: scheme of the
        linears in the tower's layers; None: float.
        """
        model = _without_text(config, is_random=entries is None)
        stored = {}
        if entries is not None:
            stored = _fill_(model, config, entries, str(folder))
        model = model.to(device).requires_grad_(False)
        finite = FiniteCheck()
        for name, parameter in model.named_parameters():
            if name in stored:
                finite.add(stored[name], parameter)
        finite.check()
        # Only parameters are converted: the rotary frequencies, which are buffers, stay in float32.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        model.eval()
        if scheme is not None:
            round_layers_(model, Scheme.parse(scheme))
        normalizers = {"image": normalizer_of(load_image_processor(folder), device)}
        if config.family.video:
            options = VideoProcessor(folder, config.family.video).options
            normalizers["video"] = Normalizer.of_video(options, device)
        return cls(config, model, normalizers, dtype, encodes_alone)

    @property
    def workspace_bytes(self) -> int:
        """Estimated memory of one call: the activations of a layer, and the pixels."""
        num_patches = MAX_VALUES // self._values_of_patch
        pixels = (2 * self.dtype.itemsize + 16) * MAX_VALUES
        return self.activation_bytes(num_patches) + pixels

    @property
    def _vision(self) -> Mapping[str, Any]:
        """Sizes of the part of the tower that reads the pixels."""
        vision = self.config.values["vision_config"]
        return vision.get(SAM_CONFIG, vision)

    @property
    def _values_of_patch(self) -> int:
        vision = self._vision
        return 3 * side_of(vision, "patch_size") ** 2 * vision.get("temporal_patch_size", 1)

    def activation_bytes(self, num_patches: int) -> int:
        """Return the estimated memory of the activations of a layer."""
        vision = self._vision
        hidden = next(vision[key] for key in WIDTHS if key in vision)
        # residual stream, norm, queries, keys and values, rotated queries and keys, output; and the
        # feed-forward twice
        of_patch = 10 * hidden + 2 * vision.get("intermediate_size", 4 * hidden)
        if SAM_CONFIG in self.config.values["vision_config"]:
            # a bias for each pair of patches of an image, in each head
            patches = (side_of(vision, "image_size") // side_of(vision, "patch_size")) ** 2
            of_patch += vision["num_attention_heads"] * patches
        return self.dtype.itemsize * num_patches * of_patch

    @property
    def device(self) -> torch.device:
        return self.normalizers["image"].mean.device

    @torch.inference_mode()
    def encode(self, items: Sequence[MediaItem]) -> list[torch.Tensor]:
        """Compute the embeddings [M, C] of each item."""
        frames = [(index, frame) for index, item in enumerate(items) for frame in frames_of(item)]
        groups: dict[tuple, list[int]] = {}
        for number, (_, frame) in enumerate(frames):
            groups.setdefault((frame.kind, *map(_likeness, frame.features)), []).append(number)
        found: dict[int, torch.Tensor] = {}
        for numbers in groups.values():
            size = max(len(each.data) for each in frames[numbers[0]][1].features)
            count = 1 if self.encodes_alone else max(1, MAX_VALUES // size)
            for start in range(0, len(numbers), count):
                chosen = numbers[start : start + count]
                rows = self._encode_alike([frames[number][1] for number in chosen])
                found.update(zip(chosen, rows, strict=True))
        of_items: list[list[torch.Tensor]] = [[] for _ in items]
        for number, (index, _) in enumerate(frames):
            of_items[index].append(found[number])
        return [rows[0] if len(rows) == 1 else torch.cat(rows) for rows in of_items]

    def _encode_alike(self, frames: Sequence["Frame"]) -> Sequence[torch.Tensor]:
        """Encode frames of one kind whose features have equal shapes, in one call."""
        inputs: dict[str, list[torch.Tensor]] = {}
        for frame in frames:
            for feature in frame.features:
                if self.encode_grid is not None and feature.name == "image_grid_thw":
                    continue  # only the host needs it
                tensor = self._to_device(feature)
                if feature.dtype in PIXEL_DTYPES:
                    tensor = self.normalizers[frame.kind](tensor).to(self.dtype)
                inputs.setdefault(feature.name, []).append(tensor)
        if self.encode_grid is not None:
            patches_BNP = torch.stack(inputs["pixel_values"])
            _, rows, columns = _grid_of(frames[0]).tolist()
            return self.encode_grid(patches_BNP, rows, columns)
        return ENCODERS[self.config.family.encoder](self.model, inputs)

    def _to_device(self, feature: Feature) -> torch.Tensor:
        """Copy a feature to the device, without waiting for the copy."""
        array, is_cuda = feature.array(), self.device.type == "cuda"
        dtype = getattr(torch, feature.dtype)
        host = torch.empty(array.shape, dtype=dtype, pin_memory=is_cuda)
        host.numpy()[...] = array
        return host.to(self.device, non_blocking=True)


def _likeness(feature: Feature) -> tuple[Any, ...]:
    """Return a key; features with equal keys can be encoded in one call."""
    of_grid = feature.data if feature.name == "image_grid_thw" else b""
    return feature.name, feature.shape, of_grid


class Frame(NamedTuple):
    """An image, or a group of frames of a video: the smallest input of the tower."""

    kind: str  # one of settings.KINDS
    features: tuple[Feature, ...]


def frames_of(item: MediaItem) -> list[Frame]:
    """Split an item into frames, each of which the tower encodes independently."""
    count = item.grid[0] if item.grid else 1
    if count == 1:
        return [Frame(item.kind, item.features)]
    features = {each.name: each.array() for each in item.features}
    _, rows, columns = features["image_grid_thw"].tolist()
    grid = Feature.of("image_grid_thw", np.array([1, rows, columns]))
    return [
        Frame(item.kind, (Feature.of("pixel_values", patches), grid))
        for patches in np.split(features["pixel_values"], count)
    ]


def _grid_of(frame: Frame) -> np.ndarray:
    return next(each.array() for each in frame.features if each.name == "image_grid_thw")


def _without_text(config: VisionConfig, *, is_random: bool) -> Any:
    """Return the vision part of transformers' model; no encoder calls the text part.

    `is_random`: initialize the weights at random; else they are left uninitialized. Raises
    CheckpointError.
    """
    import transformers
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    values = copy.deepcopy(dict(config.values))
    text = values.get("text_config", values)
    text["num_hidden_layers"] = 1
    for key in ("layer_types", "mlp_only_layers", "moe_layers"):
        if text.get(key):
            text[key] = text[key][-1:] if key == "layer_types" else []
    if text.get("mlp_layer_types"):
        text["mlp_layer_types"] = ["dense"]  # a layer without experts is smaller
    text.pop("per_layer_config", None)  # it describes layers that are left out
    if "first_k_dense_replace" in text:
        text["first_k_dense_replace"] = 1
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if text.get(key):
            text[key] = 0
    if values.get("audio_config"):
        values["audio_config"] = config.family.audio and dict(config.family.audio)
    for key in SIZES & values["vision_config"].keys():
        if not is_size(values["vision_config"][key]):
            raise CheckpointError(
                f"config.json vision_config.{key}",
                f"expected a positive whole number, found {values['vision_config'][key]!r:.100}",
                COPY_CONFIG,
            )
    try:
        filled = AutoConfig.for_model(values.pop("model_type"), **values)
        with contextlib.nullcontext() if is_random else no_init_weights():
            auto = getattr(transformers, config.family.auto_class)
            model = auto.from_config(filled, dtype=torch.float32)
    except Exception as error:  # transformers does not document its exceptions
        raise CheckpointError(
            "config.json vision_config",
            f"transformers cannot build the vision tower: {one_line(error)}",
            COPY_CONFIG,
        ) from error
    _drop_others_(model, tuple(config.family.prefixes.values()))
    for module in model.modules():
        # transformers states True for Phi-4-multimodal, and attends causally if nothing is padded
        if getattr(module, "is_causal", False):
            module.is_causal = False
    return model


def _drop_others_(module: torch.nn.Module, prefixes: tuple[str, ...], path: str = "") -> None:
    """Remove the submodules without tensors whose names have one of these prefixes."""
    for name, child in list(module.named_children()):
        own = f"{path}{name}."
        if own.startswith(prefixes):
            continue
        if any(prefix.startswith(own) for prefix in prefixes):
            _drop_others_(child, prefixes, own)
        else:
            setattr(module, name, None)


def _fill_(
    model: torch.nn.Module, config: VisionConfig, entries: Mapping[str, TensorEntry], folder: str
) -> dict[str, str]:
    """Copy a checkpoint's tensors into the vision part. Raises CheckpointError.

    Returns: name of a parameter or buffer -> its name in the checkpoint.
    """
    prefixes, convert = config.family.prefixes, CONVERSIONS[config.family.tensors]
    state = {
        name: tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name.startswith(tuple(prefixes.values()))
    }
    filled = {}
    with torch.no_grad():
        for stored, entry in entries.items():
            prefix = next((each for each in prefixes if stored.startswith(each)), None)
            # older checkpoints contain position_ids, a constant
            if prefix is None or stored.endswith("position_ids"):
                continue
            name = prefixes[prefix] + stored.removeprefix(prefix)
            for own, tensor in convert(name, entry.read(), config.values):
                _copy_(state, own, tensor, stored)
                filled[own] = stored
    if missing := state.keys() - filled:
        raise CheckpointError(
            names_text(sorted(missing)),
            f"tensors of the vision tower are missing from {folder}",
            "quantize the whole model again, or copy them from the original model",
        )
    return filled


def _copy_(state: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor, stored: str) -> None:
    """Copy a tensor, stored under the name `stored`, into the model. Raises CheckpointError."""
    if name not in state:
        raise CheckpointError(
            stored,
            "is a tensor that the vision tower does not have",
            COPY_CONFIG,
        )
    if tensor.shape != state[name].shape:
        raise CheckpointError(
            stored,
            f"expected {list(state[name].shape)} from config.json, found {list(tensor.shape)}",
            COPY_CONFIG,
        )
    state[name].copy_(tensor)
