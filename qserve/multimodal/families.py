"""VisionFamily: one row for each vision-language architecture that is served. Loads no torch.

The text model is a row of formats/families.py; transformers builds the tower and its projector.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import InputError, one_line
from formats.quant_config import BLOCK
from qserve.model.filled_config import filled_config


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """Tokens, tensor names and layout of one architecture."""

    architecture: str  # in config.json of the whole model
    image_token_keys: tuple[str, ...] = ("image_token_id",)  # in config.json; the first found
    # key of the token that a chat template writes for an image; "": the image token itself
    placeholder_key: str = ""
    layout: str  # row of layouts.table.LAYOUTS: the tokens that an image becomes
    # row of encoders.ENCODERS: how the tower is called; "grid": qwen_tower.py
    encoder: str
    video: str = ""  # row of video_processor.KINDS; "": it takes no videos
    # number of pairs of channels of each axis where the text model's positions have three axes and
    # config.json does not say it; (): positions are numbers
    axis_pairs: tuple[int, ...] = ()
    has_interleaved_axes: bool = False
    is_mutual: bool = False  # embeddings of an image attend to each other in both directions
    # the same in layers with a window, where the text model's config says it
    has_mutual_windows: bool = False
    # argument of transformers' model: 1 for each token of an image, else 0; "": there is none
    kinds_argument: str = ""
    # the processor joins its newlines with those of the prompt around an image
    joins_newlines: bool = False
    # prefix of a tensor's name in the file -> in transformers' model; the first match counts
    prefixes: Mapping[str, str]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of media that prompts may have."""
        return frozenset({"image", "video"} if self.video else {"image"})


IDEFICS_3 = {
    "model.vision_model.": "vision_model.",
    "model.connector.": "connector.",
}
# The published files have a level more, which transformers 5 does not write.
LLAVA = {
    "vision_tower.vision_model.": "vision_tower.",
    "vision_tower.": "vision_tower.",
    "multi_modal_projector.": "multi_modal_projector.",
}
LLAVA |= {f"model.{stored}": own for stored, own in LLAVA.items()}
GEMMA_4 = {
    f"{parent}{part}.": f"{part}."
    for parent in ("model.", "")
    for part in ("vision_tower", "embed_vision")
}
NEWLINE = {f"{parent}image_newline": "image_newline" for parent in ("", "model.")}
QWEN = {"visual.": "visual.", "model.visual.": "visual."}
VISION_FAMILIES: dict[str, VisionFamily] = {
    family.architecture: family
    for family in (
        VisionFamily(
            architecture="Idefics3ForConditionalGeneration",
            layout="tiles",
            encoder="tiles",
            prefixes=IDEFICS_3,
        ),
        VisionFamily(
            architecture="SmolVLMForConditionalGeneration",
            layout="tiles",
            encoder="tiles",
            prefixes=IDEFICS_3,
        ),
        VisionFamily(
            architecture="LlavaForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="square",
            encoder="square",
            prefixes=LLAVA,
        ),
        VisionFamily(
            architecture="LlavaNextForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="next",
            encoder="squares",
            prefixes=LLAVA | NEWLINE,
        ),
        VisionFamily(
            architecture="LlavaOnevisionForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="one_vision",
            encoder="squares",
            prefixes=LLAVA | NEWLINE,
        ),
        VisionFamily(
            architecture="InternVLForConditionalGeneration",
            layout="intern_tiles",
            encoder="square",
            prefixes=LLAVA,
        ),
        VisionFamily(
            architecture="Gemma3ForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            placeholder_key="boi_token_index",
            layout="framed_square",
            encoder="square",
            is_mutual=True,
            kinds_argument="token_type_ids",
            joins_newlines=True,
            prefixes=LLAVA,
        ),
        VisionFamily(
            architecture="Gemma4ForConditionalGeneration",
            layout="pooled",
            encoder="pooled",
            has_mutual_windows=True,
            kinds_argument="mm_token_type_ids",
            prefixes=GEMMA_4,
        ),
        VisionFamily(
            architecture="Mistral3ForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="rows",
            encoder="rows",
            prefixes=LLAVA,
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                axis_pairs=(16, 24, 24),
                layout="grid",
                kinds_argument="mm_token_type_ids",
                encoder="grid",
                video="qwen2",
                prefixes=QWEN,
            )
            for name in ("Qwen2VL", "Qwen2_5_VL")
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                axis_pairs=(24, 20, 20),
                has_interleaved_axes=True,
                layout="grid",
                kinds_argument="mm_token_type_ids",
                encoder="grid",
                video="qwen3",
                prefixes=QWEN,
            )
            for name in ("Qwen3VL", "Qwen3VLMoe")
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                axis_pairs=(8, 12, 12),
                layout="grid",
                kinds_argument="mm_token_type_ids",
                encoder="patches",
                prefixes=QWEN,
            )
            for name in ("Glm4v", "Glm4vMoe", "Glm46V")
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                axis_pairs=(11, 11, 10),
                has_interleaved_axes=True,
                layout="grid",
                kinds_argument="mm_token_type_ids",
                encoder="grid",
                video="qwen3",
                prefixes=QWEN,
            )
            for name in ("Qwen3_5", "Qwen3_5Moe")
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Row and config.json of one vision-language model."""

    family: VisionFamily
    values: Mapping[str, Any]  # of config.json of the whole model, with transformers' defaults
    image_token_id: int
    placeholder_id: int  # the token of an unexpanded image
    video_token_id: int | None = None  # also of an unexpanded video; None: it takes no videos

    @property
    def media_tokens(self) -> frozenset[int]:
        """Tokens of media in prompts."""
        found = (self.image_token_id, self.placeholder_id, self.video_token_id)
        return frozenset(token for token in found if token is not None)

    @property
    def axis_pairs(self) -> tuple[int, ...]:
        """Number of pairs of channels of each axis of a position; (): positions are numbers."""
        if not self.family.axis_pairs:
            return ()
        ropes = self.values["text_config"].get("rope_parameters") or {}
        return tuple(ropes.get("mrope_section") or self.family.axis_pairs)

    @property
    def is_mutual(self) -> bool:
        """True if embeddings of an image attend to each other in both directions."""
        return self.family.is_mutual or self.sees_ahead_in_windows

    @property
    def sees_ahead_in_windows(self) -> bool:
        """True if they do so in layers with a window alone."""
        stated = self.values["text_config"].get("use_bidirectional_attention")
        return self.family.has_mutual_windows and stated == "vision"

    def fill_id(self, kind: str = "image") -> int:
        """Token at the positions of embeddings: that of the kind, or 0 if it has no embedding.

        Inputs of each layer (Gemma 4) are those of the padding.
        """
        token = self.video_token_id if kind == "video" else self.image_token_id
        text = self.values["text_config"]
        vocab_size = text["vocab_size"]
        if text.get("hidden_size_per_layer_input"):
            token = text["pad_token_id"]
        return token if token is not None and token < vocab_size else 0

    @property
    def num_levels(self) -> int:
        """Number of first layers after which something is added to rows with embeddings."""
        return len(self.values["vision_config"].get("deepstack_visual_indexes") or ())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "VisionConfig | None":
        """Return what config.json describes; None for a text model. Raises InputError."""
        family = VISION_FAMILIES.get(architecture_of(values) or "")
        if family is None or not isinstance(values.get("vision_config"), dict):
            return None
        values = _filled(values)
        image = _token(values, family.image_token_keys)
        key = family.placeholder_key
        return cls(
            family=family,
            values=values,
            image_token_id=image,
            placeholder_id=_token(values, (key,)) if key else image,
            video_token_id=_token(values, ("video_token_id",)) if family.video else None,
        )


def _filled(values: Mapping[str, Any]) -> dict[str, Any]:
    # Without the block, for which transformers would look for the library that wrote it.
    plain = {key: value for key, value in values.items() if key != BLOCK}
    try:
        return {**filled_config(plain), "architectures": values["architectures"]}
    except Exception as error:  # exceptions of config classes are not documented
        raise InputError(
            "config.json", f"transformers rejects it: {one_line(error)}", "fetch it again"
        ) from error


def _token(values: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if type(values.get(key)) is int:
            return values[key]
    found = values.get(keys[0])
    raise InputError(f"config.json {keys[0]}", f"expected a token id, found {found!r:.100}")
