"""VISION_FAMILIES: one row for each vision-language architecture that is served. Loads no torch.

The text model has its own row in formats/families.py. transformers builds the vision tower and the
projector.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import COPY_CONFIG, InputError, one_line
from formats.quant_config import BLOCK
from qserve.model.filled_config import filled_config
from qserve.multimodal.family import VisionFamily
from qserve.multimodal.positions import Axes
from qserve.multimodal.rows.grids import GRIDS
from qserve.multimodal.rows.squares import SQUARES

VISION_FAMILIES: dict[str, VisionFamily] = {
    family.architecture: family for family in (*SQUARES, *GRIDS)
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
    def expert_tokens(self) -> tuple[int, ...]:
        """Tokens of prompts for which the model has other experts."""
        return tuple(_token(self.values, (key,)) for key in self.family.expert_token_keys)

    @property
    def text(self) -> Mapping[str, Any]:
        """The keys of the text model, which are next to `vision_config` in some models."""
        return self.values.get("text_config", self.values)

    def placeholder_of(self, encode: Callable[[str, bool], list[int]]) -> int:
        """Return the token of an image in a prompt that is not expanded yet. Raises InputError.

        `encode`: the model's tokenizer; only the tokenizer knows the placeholder of Llama 4.
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
    def axes(self) -> Axes | None:
        """Axes of a position; None: one."""
        count = len(self.axis_pairs)
        return Axes(count, self.family.counts_images) if count else None

    @property
    def is_mutual(self) -> bool:
        """True if media items attend to themselves in both directions."""
        family = self.family
        is_stated = family.states_mutual and self._states_mutual
        is_always = family.is_mutual or family.has_mutual_prompt
        return is_always or is_stated or self.sees_ahead_in_windows

    @property
    def sees_ahead_in_windows(self) -> bool:
        """True if they do so only in layers with a window."""
        return self.family.has_mutual_windows and self._states_mutual

    @property
    def _states_mutual(self) -> bool:
        return self.text.get("use_bidirectional_attention") == "vision"

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
        family = family.with_tower(values)
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
            "config.json", f"transformers rejects it: {one_line(error)}", "download it again"
        ) from error


def _token(values: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    for key in keys:
        if type(values.get(key)) is int and values[key] >= 0:
            return values[key]
    found = values.get(keys[0])
    raise InputError(
        f"config.json {keys[0]}",
        f"expected a token id, found {found!r:.100}",
        COPY_CONFIG,
    )
