"""VisionFamily: one row for each vision-language architecture that is served. Loads no torch.

The text model has its own row in formats/families.py. transformers builds the vision tower and the
projector.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import InputError, one_line
from formats.quant_config import BLOCK
from qserve.model.filled_config import filled_config
from qserve.multimodal.kimi_config import as_kimi_k25
from qserve.multimodal.stored_forms.intern_s2_config import as_qwen3_5_moe
from qserve.multimodal.stored_forms.internvl_config import as_internvl
from qserve.multimodal.stored_forms.omni_config import (
    OMNI_2_5,
    OMNI_AUDIO,
    as_omni,
    as_qwen3_vl_moe,
)
from qserve.multimodal.stored_forms.phi4_config import SMALL_AUDIO, as_phi4
from qserve.multimodal.stored_forms.prefixes import (
    DEEPSEEK,
    GEMMA_4,
    IDEFICS,
    INTERNVL_CHAT,
    KIMI,
    LIGHT_ON,
    LLAMA_4,
    LLAVA,
    NEWLINE,
    OMNI,
    PADDLE,
    PHI_4,
    QWEN,
)
from qserve.text.image_text import IMAGE_TEXTS


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
    # row of encoders.ENCODERS, which calls the tower; "grid": qwen_tower.py does instead
    encoder: str
    video: str = ""  # row of video_processor.KINDS; "": the model takes no videos
    # number of channel pairs of each axis, where the text model's positions have three axes and
    # config.json does not state it; (): positions have one axis
    axis_pairs: tuple[int, ...] = ()
    has_interleaved_axes: bool = False  # True: the axes alternate over the channel pairs
    is_mutual: bool = False  # True: embeddings of an image attend to each other in both directions
    # True: all tokens of a prompt with images attend to each other in both directions
    has_mutual_prompt: bool = False
    # True: only images do, in layers with a window, and if the text model's config states it
    has_mutual_windows: bool = False
    # argument of transformers' model with 1 for each token of an image, else 0; "": it has none
    kinds_argument: str = ""
    # config.json's values -> values of a model that transformers has; None: unchanged. The function
    # returns None for a vision part that is not supported
    config: Callable[[Mapping[str, Any]], dict[str, Any] | None] | None = None
    states_tower: bool = True  # False: config.json may have no vision_config
    tensors: str = ""  # row of stored_towers.CONVERSIONS; "": tensors are stored as they are used
    # audio_config of the model whose vision part is used; its audio part is not
    audio: Mapping[str, Any] | None = None
    # True: the newlines around an image are joined with those of the prompt
    joins_newlines: bool = False
    # prefix of a tensor's name in the checkpoint -> prefix in transformers' model; the first match
    # counts
    prefixes: Mapping[str, str]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of media that the model takes."""
        return frozenset({"image", "video"} if self.video else {"image"})


VISION_FAMILIES: dict[str, VisionFamily] = {
    family.architecture: family
    for family in (
        VisionFamily(
            architecture="Idefics2ForConditionalGeneration",
            layout="idefics2",
            encoder="resampled",
            prefixes=IDEFICS,
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                layout="tiles",
                encoder="tiles",
                prefixes=IDEFICS,
            )
            for name in ("Idefics3", "SmolVLM")
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                image_token_keys=("image_token_id", "image_token_index"),
                layout="square",
                encoder="square",
                prefixes=LLAVA,
            )
            for name in ("Llava", "VipLlava")
        ),
        VisionFamily(
            architecture="DeepseekVLForConditionalGeneration",
            layout="square",
            encoder="square",
            prefixes=DEEPSEEK,
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
            architecture="InternVLChatModel",
            image_token_keys=(),
            placeholder=IMAGE_TEXTS["InternVLChatModel"].own,
            image_processor="internvl",
            layout="intern_cuts",
            encoder="square",
            config=as_internvl,
            tensors="internvl",
            prefixes=INTERNVL_CHAT,
        ),
        VisionFamily(
            architecture="AyaVisionForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            layout="aya_tiles",
            encoder="square",
            prefixes=LLAVA,
        ),
        VisionFamily(
            architecture="Lfm2VlForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            image_processor="lfm2_vl",
            layout="lfm2",
            encoder="any_size",
            prefixes=LLAVA,
        ),
        VisionFamily(
            architecture="Llama4ForConditionalGeneration",
            image_token_keys=("image_token_id", "image_token_index"),
            placeholder="<|image|>",
            image_processor="llama4",
            layout="llama4",
            encoder="llama4",
            prefixes=LLAMA_4,
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForCausalLM",
                image_processor="phi4",
                layout="phi4",
                encoder="phi4",
                config=as_phi4,
                states_tower=name != "Phi4MM",
                tensors="phi4",
                audio=SMALL_AUDIO,
                prefixes=PHI_4,
            )
            for name in ("Phi4Multimodal", "Phi4MM")
        ),
        VisionFamily(
            architecture="Cohere2VisionForConditionalGeneration",
            image_processor="cohere2_vision",
            layout="cohere2",
            encoder="square",
            prefixes=LLAVA,
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                image_processor=processor,
                layout="kimi",
                encoder="kimi",
                config=as_kimi_k25,
                tensors="kimi",
                prefixes=KIMI,
            )
            for name, processor in (
                ("KimiVL", "kimi_vl"),
                ("KimiK25", "kimi"),
                ("Kimi_K25", "kimi"),  # transformers' name
            )
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
            architecture="PaliGemmaForConditionalGeneration",
            image_token_keys=("image_token_index", "image_token_id"),
            layout="prompt_squares",
            encoder="prompt_squares",
            has_mutual_prompt=True,
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
        VisionFamily(
            architecture="Exaone4_5_ForConditionalGeneration",
            layout="grid",
            encoder="patches",
            prefixes=QWEN,
        ),
        VisionFamily(
            architecture="PaddleOCRVLForConditionalGeneration",
            axis_pairs=(16, 24, 24),
            layout="grid",
            kinds_argument="mm_token_type_ids",
            encoder="square_patches",
            tensors="paddle",
            prefixes=PADDLE,
        ),
        VisionFamily(
            architecture="LightOnOcrForConditionalGeneration",
            layout="plain_rows",
            encoder="rows",
            prefixes=LIGHT_ON,
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
                architecture=name,
                image_token_keys=("image_token_id", "image_token_index"),
                axis_pairs=(16, 24, 24),
                layout="grid",
                encoder="patches",
                config=as_omni,
                states_tower=False,
                audio=OMNI_AUDIO,
                prefixes=OMNI,
            )
            for name in OMNI_2_5
        ),
        *(
            VisionFamily(
                architecture=f"{name}ForConditionalGeneration",
                axis_pairs=(24, 20, 20),
                has_interleaved_axes=True,
                layout="grid",
                kinds_argument="mm_token_type_ids",
                encoder="grid",
                config=as_qwen3_vl_moe,
                states_tower=False,
                tensors="omni",
                prefixes=OMNI,
            )
            for name in ("Qwen3OmniMoe", "Qwen3OmniMoeThinker")
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
            for name in ("Glm4v", "Glm4vMoe", "Glm46V", "GlmOcr")
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
                config=config,
                prefixes=QWEN,
            )
            for name, config in (
                ("Qwen3_5", None),
                ("Qwen3_5Moe", None),
                ("InternS2Preview", as_qwen3_5_moe),
            )
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """One vision-language model: its family and the values of its config.json."""

    family: VisionFamily
    # config.json of the whole model, completed with transformers' defaults
    values: Mapping[str, Any]
    image_token_id: int | None  # None: only the tokenizer knows it; see with_tokens
    # token of an image in a prompt that is not expanded yet; see placeholder_of
    placeholder_id: int | None
    # token of a video, before and after it is expanded; None: the model takes no videos
    video_token_id: int | None = None

    @property
    def media_tokens(self) -> frozenset[int]:
        """Token ids that mark media in prompts."""
        found = (self.image_token_id, self.placeholder_id, self.video_token_id)
        return frozenset(token for token in found if token is not None)

    @property
    def text(self) -> Mapping[str, Any]:
        """The keys of the text model, which are next to `vision_config` in some models."""
        return self.values.get("text_config", self.values)

    def placeholder_of(self, encode: Callable[[str, bool], list[int]]) -> int:
        """Return the token of an image in a prompt that is not expanded yet. Raises InputError.

        `encode`: the model's tokenizer, which alone knows the placeholder of Llama 4.
        """
        text = self.family.placeholder
        if text:
            return token_of(text, encode)
        assert self.placeholder_id is not None  # config.json states it
        return self.placeholder_id

    def with_tokens(self, encode: Callable[[str, bool], list[int]]) -> "VisionConfig":
        """Return a config with the image token. Raises InputError.

        `encode`: the model's tokenizer.
        """
        if self.image_token_id is not None:
            return self
        token = self.placeholder_of(encode)
        return replace(self, image_token_id=token, placeholder_id=token)

    @property
    def axis_pairs(self) -> tuple[int, ...]:
        """Number of channel pairs of each axis of a position; (): positions have one axis."""
        if not self.family.axis_pairs:
            return ()
        ropes = self.text.get("rope_parameters") or {}
        return tuple(ropes.get("mrope_section") or self.family.axis_pairs)

    @property
    def is_mutual(self) -> bool:
        """True if media items attend to themselves in both directions."""
        is_always = self.family.is_mutual or self.family.has_mutual_prompt
        return is_always or self.sees_ahead_in_windows

    @property
    def sees_ahead_in_windows(self) -> bool:
        """True if they do so only in layers with a window."""
        stated = self.text.get("use_bidirectional_attention")
        return self.family.has_mutual_windows and stated == "vision"

    def fill_id(self, kind: str = "image") -> int:
        """Return the token at the positions of embeddings.

        It is the token of the kind, or 0 if the text model has no embedding for that one. In models
        with an input for each layer (Gemma 4) it is the padding token, whose inputs are used there.
        """
        token = self.video_token_id if kind == "video" else self.image_token_id
        text = self.text
        vocab_size = text["vocab_size"]
        if text.get("hidden_size_per_layer_input"):
            token = text["pad_token_id"]
        return token if token is not None and token < vocab_size else 0

    @property
    def num_levels(self) -> int:
        """Number of first layers of the text model after which more embeddings are added."""
        return len(self.values["vision_config"].get("deepstack_visual_indexes") or ())

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "VisionConfig | None":
        """Read config.json's values. Return None for a text model. Raises InputError."""
        family = VISION_FAMILIES.get(architecture_of(values) or "")
        if family is None:
            return None
        if family.states_tower and not isinstance(values.get("vision_config"), dict):
            return None
        filled = _filled(values, family)
        if filled is None:
            return None
        values, keys = filled, family.image_token_keys
        image = _token(values, keys) if keys else None
        key = family.placeholder_key
        return cls(
            family=family,
            values=values,
            image_token_id=image,
            placeholder_id=_token(values, (key,)) if key else image,
            video_token_id=_token(values, ("video_token_id",)) if family.video else None,
        )


def token_of(text: str, encode: Callable[[str, bool], list[int]]) -> int:
    """Return the token of a text. Raises InputError if there is no single one."""
    found = encode(text, False)
    if len(found) != 1:
        raise InputError(
            f"token {text}",
            "is not in the model's tokenizer",
            "copy tokenizer.json from the original model",
        )
    return found[0]


def _filled(values: Mapping[str, Any], family: VisionFamily) -> dict[str, Any] | None:
    """Return the values with transformers' keys and defaults. Raises InputError.

    None: the family's vision part is of a form that is not supported.
    """
    # Without the quantization block: transformers would require the package that wrote it.
    plain = {key: value for key, value in values.items() if key != BLOCK}
    try:
        known = plain if family.config is None else family.config(plain)
        if known is None:
            return None
        return {**filled_config(known), "architectures": values["architectures"]}
    except Exception as error:  # which exceptions config classes raise is not documented
        raise InputError(
            "config.json", f"transformers rejects it: {one_line(error)}", "fetch it again"
        ) from error


def _token(values: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if type(values.get(key)) is int and values[key] >= 0:
            return values[key]
    found = values.get(keys[0])
    raise InputError(f"config.json {keys[0]}", f"expected a token id, found {found!r:.100}")
