"""VisionModel: transformers' vision-language model up to its first decoder layer.

It computes the layers' inputs for a window with images: image embeddings from the vision tower,
positions with three axes, and rows that are added to the outputs of the first layers (deepstack).

Legend: S tokens of a window, R image tokens among them, D hidden size.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn

from calibrate.float_model import FloatModel
from calibrate.texts.data import CalibrationData
from calibrate.texts.image_windows import ImageWindow
from formats.errors import CheckpointError, one_line
from formats.table import names_text


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowMedia:
    """Inputs of the layers for one window with images, besides its token ids."""

    is_image_S: torch.Tensor  # bool
    rows_RD: torch.Tensor  # embeddings of the image tokens
    added_RD: tuple[torch.Tensor, ...]  # deepstack rows of the first layers, one tensor per layer
    positions_AS: torch.Tensor | None  # None: plain positions 0, 1, ...
    is_mutual: bool  # the tokens of an image attend to each other in both directions
    # bool: tokens that have other experts than text; None: the model has no such experts
    is_expert_S: torch.Tensor | None = None
    in_windows: bool = False  # ... only in layers with a sliding window

    @property
    def blocks_S(self) -> torch.Tensor:
        """Index of each token's image, or -1 for text. Adjacent image tokens are one image."""
        starts_S = self.is_image_S & ~self.is_image_S.roll(1).index_fill(0, torch.tensor(0), False)
        return torch.where(self.is_image_S, starts_S.cumsum(0), -1)


# Text model types whose rotary tables pair adjacent channels, where the layers expect two halves
ADJACENT = ("glm4v_text", "glm_ocr_text")
# Models in which all tokens of a prompt with images attend to each other
MUTUAL_PROMPTS = ("paligemma",)
# Models whose tensors transformers finds only together with the output matrix
WITH_HEAD = ("lighton_ocr",)
# Models of which transformers has only the class with the output matrix
ONLY_WITH_HEAD = ("nemotron_h_omni",)
Media = Sequence[WindowMedia | None]  # one entry per window of a batch; None: text only


def predicted_WS(media: Media, shape: Sequence[int]) -> torch.Tensor:
    """Return the mask [W, S] of positions whose next token is text, not an image token."""
    found_WS = torch.ones(*shape, dtype=torch.bool)
    for found_S, each in zip(found_WS, media, strict=False):
        if each is not None:
            found_S[:-1] = ~each.is_image_S[1:]
    return found_WS


def open_media(
    model: FloatModel, data: CalibrationData | None, device: str, dtype: torch.dtype
) -> tuple[list[WindowMedia | None], nn.Module | None]:
    """Return the images of each window, and the rotary embedding for positions with three axes.

    Returns ([], None) without images. Raises CheckpointError if the tower cannot be loaded, or the
    attention of such a model is not supported here.
    """
    if data is None or not data.images_W:
        return [], None
    kind = model.reader.whole_config.get("model_type")
    if kind in MUTUAL_PROMPTS:
        raise CheckpointError(
            str(model.folder),
            f"calibration data has images, which are not supported for {kind}: all tokens of its"
            " prompts attend to each other",
            "calibrate on texts without images",
        )
    encode = None if data.chats is None else data.chats.tower(device, dtype)
    if encode is not None:
        return [_plain_media(window, encode) for window in data.images_W], None
    vision = VisionModel(model, device, dtype)
    return vision.media(data), vision.rotary


def _plain_media(
    window: ImageWindow, encode: Callable[[Sequence[Any]], torch.Tensor]
) -> WindowMedia | None:
    """Return the images of a window of a model with plain positions and causal attention."""
    if not window.images:
        return None
    return WindowMedia(
        is_image_S=window.is_image_S,
        rows_RD=encode(window.images).cpu(),
        added_RD=(),
        positions_AS=None,
        is_mutual=False,
    )


def axis_positions(media: Media, length: int, device: str) -> torch.Tensor:
    """Return the positions of a batch on the model's axes, [A, B, S]."""
    counts = {len(each.positions_AS) for each in media if each and each.positions_AS is not None}
    plain_AS = torch.arange(length).expand(max(counts, default=3), -1)
    found = [
        plain_AS if each is None or each.positions_AS is None else each.positions_AS
        for each in media
    ]
    return torch.stack(found, dim=1).to(device)


def mutual_mask(
    media: Media, length: int, window: int, device: str, dtype: torch.dtype
) -> torch.Tensor:
    """Return the additive mask [B, 1, S, S] with which an image's tokens attend to each other.

    Other tokens attend causally. `window`: the sliding window, or the length for full attention.
    """
    ids_S = torch.arange(length)
    distance_SS = ids_S[:, None] - ids_S
    found = []
    for each in media:
        seen_SS = distance_SS >= 0
        if each is not None:
            blocks_S = each.blocks_S
            seen_SS = seen_SS | ((blocks_S[:, None] == blocks_S) & (blocks_S >= 0))
        found.append(seen_SS & (distance_SS < window))
    seen_B1SS = torch.stack(found)[:, None].to(device)
    mask_B1SS = torch.zeros(seen_B1SS.shape, dtype=dtype, device=device)
    return mask_B1SS.masked_fill_(~seen_B1SS, torch.finfo(dtype).min)


def with_added(output_BSD: torch.Tensor, layer: int, media: Media) -> torch.Tensor:
    """Add the deepstack rows of layer `layer` to its outputs."""
    levels = [() if each is None else each.added_RD for each in media]
    if not any(layer < len(level) for level in levels):
        return output_BSD
    added_BSD = torch.zeros_like(output_BSD)
    for added_SD, each, level in zip(added_BSD, media, levels, strict=True):
        if each is not None and layer < len(level):
            added_SD[each.is_image_S.to(added_SD.device)] = level[layer].to(added_SD)
    return output_BSD + added_BSD


class _LayerReached(Exception):
    """Raised when the text model is called, after its arguments are recorded."""


class _Zeros(nn.Module):
    """Replacement of the token embedding, whose values are not used here."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.zeros(1, width, dtype=dtype))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight.new_zeros(*ids.shape, self.width)


class _Halves(nn.Module):
    """Convert a rotary table with pairs in adjacent channels to one with two equal halves."""

    def __init__(self, adjacent: nn.Module) -> None:
        super().__init__()
        self.adjacent = adjacent

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tables = self.adjacent(x, position_ids)
        return tuple(each[..., ::2].repeat(*[1] * (each.ndim - 1), 2) for each in tables)


class VisionModel:
    """transformers' vision-language model of a folder, without the text model's layers."""

    def __init__(self, model: FloatModel, device: str, dtype: torch.dtype) -> None:
        """Load the model. Raises CheckpointError if transformers cannot, or tensors are missing."""
        folder = model.folder
        try:
            config = transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            _shorten_(config.get_text_config())
            has_head = config.model_type in WITH_HEAD
            loader = transformers.AutoModel
            if has_head or config.model_type in ONLY_WITH_HEAD:
                loader = transformers.AutoModelForImageTextToText
            with _quiet():
                loaded, facts = loader.from_pretrained(
                    folder,
                    config=config,
                    dtype=dtype,
                    output_loading_info=True,
                    trust_remote_code=False,
                    local_files_only=True,
                )
        except Exception as error:  # exceptions of model classes are not documented
            raise CheckpointError(
                str(folder),
                f"transformers cannot load the vision tower: {one_line(error)}",
                "calibrate on texts without images",
            ) from error
        loaded = loaded.model if has_head else loaded
        text = "language_model" if hasattr(loaded, "language_model") else "text_model"
        missing = [name.removeprefix("model." * has_head) for name in facts["missing_keys"]]
        missing = [name for name in missing if not name.startswith((f"{text}.", "lm_head."))]
        if missing:
            raise CheckpointError(
                names_text(sorted(missing)),
                f"tensors of the vision tower are missing from {folder}",
                "copy them from the original model",
            )
        self.image_token_id = _image_token_id(config)
        self._text = loaded.get_submodule(text)
        self._text.layers = nn.ModuleList()
        loaded.set_input_embeddings(_Zeros(config.get_text_config().hidden_size, dtype))
        # Without the dtype: the frequencies of rotary embeddings stay in float32.
        self._model = loaded.to(device).train(False).requires_grad_(False)
        stated = getattr(config.get_text_config(), "use_bidirectional_attention", None)
        is_stated = stated == "vision"
        self._in_windows = is_stated and config.model_type == "gemma4"
        has_kinds = "token_type_ids" in inspect.signature(loaded.forward).parameters
        self._is_mutual = has_kinds or is_stated
        self.device, self.dtype = device, dtype

    @property
    def rotary(self) -> nn.Module | None:
        """Rotary embedding for positions with several axes; None: the model has plain ones."""
        found = getattr(self._text, "rotary_emb", None)
        if not hasattr(found, "mrope_section"):
            return None
        found = copy.deepcopy(found)
        return _Halves(found) if self._text.config.model_type in ADJACENT else found

    def media(self, data: CalibrationData) -> list[WindowMedia | None]:
        """Run the tower on the images of each window."""
        return [
            self._media(window.is_image_S, data.chats.inputs(window, ids_S))
            if data.chats is not None and window.images
            else None
            for window, ids_S in zip(data.images_W, data.ids_WS, strict=True)
        ]

    @torch.no_grad()
    def _media(self, is_image_S: torch.Tensor, inputs: dict[str, torch.Tensor]) -> WindowMedia:
        ids_1S = inputs["input_ids"].clone()
        ids_1S[0, is_image_S] = self.image_token_id
        found = self._arguments({**inputs, "input_ids": ids_1S})
        positions, positions_AS = found.get("position_ids"), None
        sections = getattr(getattr(self._text, "rotary_emb", None), "mrope_section", None)
        if positions is not None and sections is not None:
            # Qwen's have the indices of tokens before those of the axes.
            positions_AS = positions[-len(sections) :, 0].cpu()
        kinds_1S = found.get("moe_mm_token_type_ids")
        return WindowMedia(
            is_image_S=is_image_S,
            rows_RD=found["inputs_embeds"][0][is_image_S.to(self.device)].cpu(),
            added_RD=tuple(each.cpu() for each in found.get("deepstack_visual_embeds") or ()),
            positions_AS=positions_AS,
            is_mutual=self._is_mutual,
            in_windows=self._in_windows,
            is_expert_S=None if kinds_1S is None else kinds_1S[0].bool().cpu(),
        )

    def _arguments(self, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Run the model until it calls its text model, and return the arguments of that call."""
        seen: dict[str, Any] = {}

        def reached(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.update(kwargs)
            raise _LayerReached

        hook = self._text.register_forward_pre_hook(reached, with_kwargs=True)
        floats = {name: each for name, each in inputs.items() if each.is_floating_point()}
        moved = {name: each.to(self.device) for name, each in inputs.items()}
        moved |= {name: each.to(self.device, self.dtype) for name, each in floats.items()}
        try:
            self._model(**moved, use_cache=False)
        except _LayerReached:
            return seen
        finally:
            hook.remove()
        raise AssertionError("the model did not call its text model")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from listing the tensors of the layers, which are not loaded."""
    logs, is_shown = transformers.logging, transformers.logging.is_progress_bar_enabled()
    level = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if is_shown:
            logs.enable_progress_bar()


def _shorten_(text: Any) -> None:
    """Reduce a text model's config to one layer, because its layers are not used."""
    text.num_hidden_layers = 1
    for key in ("layer_types", "layers_block_type"):
        if getattr(text, key, None):
            setattr(text, key, getattr(text, key)[:1])
    if getattr(text, "mlp_only_layers", None):
        text.mlp_only_layers = []
    for key in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        if getattr(text, key, None):
            setattr(text, key, 0)


def _image_token_id(config: Any) -> int:
    found = getattr(config, "image_token_id", None)
    return config.image_token_index if found is None else found
