"""ImageText: changes of a prompt's text around its images, before it is tokenized.

The chat templates of InternVL and Aya Vision write `<image>`, which their code replaces by other
tokens. The tokenizer reads it as the text of the image token. In prompts of Idefics2, transformers'
processor writes a space between an image and a word after it. Loads no torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.architecture.family import architecture_of
from formats.errors import InputError
from formats.files.json_file import read_json

CONFIG = "config.json"
IMAGE = "<image>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageText:
    """The two texts that mean an image in a prompt."""

    alias: str  # text in chat templates and prompts
    own: str  # text of the image token
    # True: a space is written between an image and a word after it
    is_spaced: bool = False
    between: str = "\n"  # text between the parts of a message

    def with_own(self, text: str) -> str:
        """Replace the alias by the text of the image token."""
        text = text.replace(self.alias, self.own)
        return (
            re.sub(rf"{re.escape(self.own)}(?=[^\s<])", f"{self.own} ", text)
            if self.is_spaced
            else text
        )

    def is_in(self, text: str) -> bool:
        return self.alias in text or self.own in text

    def as_text(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with images and texts as one text, with `between` between the parts.

        Other messages are unchanged.
        """
        parts = message.get("content")
        if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
            return dict(message)
        lines = [self.alias if part.get("type") == "image" else part.get("text") for part in parts]
        texts = [line for line in lines if isinstance(line, str)]
        if len(texts) != len(parts):
            return dict(message)
        return {**message, "content": self.between.join(texts)}


# architecture -> its texts
IMAGE_TEXTS = {
    **dict.fromkeys(
        ("InternVLChatModel", "QianfanOCRForConditionalGeneration"),
        ImageText(alias=IMAGE, own="<IMG_CONTEXT>"),
    ),
    "Phi4MMForCausalLM": ImageText(alias="<|image_1|>", own="<|endoftext10|>", between=""),
    "Idefics2ForConditionalGeneration": ImageText(alias=IMAGE, own=IMAGE, is_spaced=True),
    "AyaVisionForConditionalGeneration": ImageText(alias=IMAGE, own="<|IMG_PATCH|>"),
}


def image_text_of(folder: str | Path) -> ImageText | None:
    """Return the texts for an image of the model in a folder; None: they are one text."""
    try:
        config = read_json(Path(folder) / CONFIG)
    except InputError:  # a folder with a tokenizer alone
        return None
    return IMAGE_TEXTS.get(architecture_of(config) or "")
