"""ImageText: the text of an image in prompts of models whose tokenizer has no token for this text.

The chat templates of InternVL and Aya Vision write `<image>`, which their code replaces by other
tokens. The tokenizer reads it as the text of the image token. Loads no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import InputError
from formats.files.json_file import read_json

CONFIG = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageText:
    """The two texts that mean an image in a prompt."""

    alias: str  # text in chat templates and prompts
    own: str  # text of the image token

    def with_own(self, text: str) -> str:
        """Replace the alias by the text of the image token."""
        return text.replace(self.alias, self.own)

    def is_in(self, text: str) -> bool:
        return self.alias in text or self.own in text

    def as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with images and texts as one text: a line for each part.

        Other messages are unchanged.
        """
        parts = message.get("content")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return dict(message)
        lines = [self.alias if part.get("type") == "image" else part.get("text") for part in parts]
        texts = [line for line in lines if isinstance(line, str)]
        if len(texts) != len(parts):
            return dict(message)
        return {**message, "content": "\n".join(texts)}


# architecture -> its texts
IMAGE_TEXTS = {
    "InternVLChatModel": ImageText(alias="<image>", own="<IMG_CONTEXT>"),
    "AyaVisionForConditionalGeneration": ImageText(alias="<image>", own="<|IMG_PATCH|>"),
}


def image_text_of(folder: str | Path) -> ImageText | None:
    """Return the texts for an image of the model in a folder; None: they are one text."""
    try:
        config = read_json(Path(folder) / CONFIG)
    except InputError:  # a folder with a tokenizer alone
        return None
    return IMAGE_TEXTS.get(architecture_of(config) or "")
