"""VisionFamily: one row of the table of vision-language architectures. Loads no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Tokens, tensor names and layout of one architecture."""

    architecture: str  # name in config.json of the whole model
    # keys of config.json that may hold the image token; the first one found counts. (): it is the
    # token of `placeholder`
    image_token_keys: tuple[str, ...] = ("image_token_id",)
    # key of the token that a chat template writes for an image; "": the image token itself
    placeholder_key: str = ""
    placeholder: str = ""  # text of such a token that config.json does not state; "": none
    layout: str  # row of layouts.table.LAYOUTS, which describes the tokens of an image
    # row of image_processors.own_processor.KINDS; "": transformers' image processor
    image_processor: str = ""
    # class of transformers' image processor with Pillow, for files that name a class of the code in
    # their folder; "": the files name transformers' class
    processor_class: str = ""
    # least and most pixels of an image, where the files of `processor_class` state none; (): the
    # class has them
    default_pixels: tuple[int, ...] = ()
    # options of the image processor -> the only supported value, which missing options also have
    fixed_options: Mapping[str, Any] = field(default_factory=dict)
    # row of encoders.ENCODERS, which calls the tower; "grid": qwen_tower.py does instead
    encoder: str
    video: str = ""  # row of video_processor.KINDS; "": the model takes no videos
    # number of channel pairs of each axis, where the text model's positions have several axes and
    # config.json does not state it; (): positions have one axis
    axis_pairs: tuple[int, ...] = ()
    # True: positions of an image are columns, rows and its number, and `axis_pairs` divide the
    # channels of a head in order, so that both channels of a pair may have different axes (Hunyuan)
    counts_images: bool = False
    has_interleaved_axes: bool = False  # True: the axes alternate over the channel pairs
    # True: rows and columns alternate over the first channel pairs, and the last pairs are of
    # frames; `axis_pairs` are of rows, columns and frames (ERNIE)
    has_frames_last: bool = False
    # keys of config.json with tokens for which the model has other experts, in prompts
    expert_token_keys: tuple[str, ...] = ()
    is_mutual: bool = False  # True: embeddings of an image attend to each other in both directions
    states_mutual: bool = False  # True: the same, if the text model's config states it
    # True: all tokens of a prompt with images attend to each other in both directions
    has_mutual_prompt: bool = False
    # True: only images do, in layers with a window, and if the text model's config states it
    has_mutual_windows: bool = False
    # argument of transformers' model with 1 for each token of an image, else 0; "": it has none
    kinds_argument: str = ""
    # config.json's values -> values of a model that transformers has; None: unchanged. The function
    # returns None for a vision part that is not supported
    config: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None
    auto_class: str = "AutoModel"  # transformers' class that finds the model's class
    states_tower: bool = True  # False: config.json may have no vision_config
    # model_type of another tower that the architecture may have -> layout and encoder with it
    towers: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tensors: str = ""  # row of stored_towers.CONVERSIONS; "": tensors are stored as they are used
    # audio_config of the model whose vision part is used; its audio part is not
    audio: Mapping[str, Any] | None = None
    # True: the newlines around an image are joined with those of the prompt
    joins_newlines: bool = False
    # prefix of a tensor's name in the checkpoint -> prefix in transformers' model; the first match
    # counts
    prefixes: Mapping[str, str]

    def with_tower(self, values: Mapping[str, Any]) -> "VisionFamily":
        """Return the row with the layout and encoder for the tower that config.json states."""
        tower = values.get("vision_config")
        kind = tower.get("model_type") if isinstance(tower, Mapping) else None
        if not isinstance(kind, str) or kind not in self.towers:
            return self
        layout, encoder = self.towers[kind]
        return replace(self, layout=layout, encoder=encoder)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of media that the model takes."""
        return frozenset({"image", "video"} if self.video else {"image"})
