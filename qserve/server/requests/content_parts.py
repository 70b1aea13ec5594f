"""Parts of a message's content: text, images, videos, refusals and reasoning of earlier replies."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from qserve.server.requests.field_errors import field_error

REFUSAL = "refusal"
ASSISTANT = "assistant"
INPUT_KINDS = ("text", "input_text", "output_text")  # types of text parts
USER, TOOL = "user", "tool"
# type of an image part -> fields that may have the URL, or an object with a `url`
IMAGE_FIELDS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("url", "image"),
}
# type of a video part -> fields that may have the URL, or an object with a `url`
VIDEO_FIELDS = {
    "video_url": ("video_url",),
    "input_video": ("video_url",),
    "video": ("url", "video"),
}
DETAILS = ("auto", "low", "high", "original")  # `detail` of an image; has no effect
# types of parts in other servers' APIs -> what to send instead
OTHER_MEDIA = {
    "input_audio": "send its text",
    "audio_url": "send its text",
    "audio": "send its text",
    "input_file": "send its text, or its pages as images",
    "file": "send its text, or its pages as images",
    "image_embeds": "send the image",
}
# Type of a reasoning part -> field with the text. Redacted text is encrypted by Anthropic, so the
# model cannot read it.
THINKING = "thinking"
REASONING_FIELDS = {THINKING: THINKING, "reasoning": "text", "redacted_thinking": None}


def _refusal(value: Any) -> Any:
    """Convert a refusal part to the common form: the text in `text`."""
    if not isinstance(value, dict) or value.get("type") != REFUSAL:
        return value
    if not isinstance(value.get(REFUSAL), str):
        raise field_error("expected a part of type refusal with a text `refusal`", "add the text")
    return {"type": REFUSAL, "text": value[REFUSAL]}


def _thinking(value: Any) -> Any:
    """Convert a reasoning part to the common form: type `thinking`, text in `text`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in REASONING_FIELDS:
        return value
    name = REASONING_FIELDS[kind]
    if name is None:
        return {"type": THINKING, "text": ""}
    found = value.get(name)
    if isinstance(found, list):  # Mistral's form: a list of text parts
        found = [part.get("text") if isinstance(part, dict) else None for part in found]
        found = "".join(found) if all(isinstance(text, str) for text in found) else None
    if not isinstance(found, str):
        raise field_error(f"expected a part of type {kind} with a text `{name}`", "add the text")
    return {"type": THINKING, "text": found}


def image_part(value: Any) -> Any:
    """Convert an image part to the common form: its URL in `image_url`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in IMAGE_FIELDS:
        return value
    if value.get("file_id") is not None:
        raise field_error("file_id: this server stores no files", "send the image")
    fields = IMAGE_FIELDS[kind]
    found = next((value[name] for name in fields if value.get(name) is not None), None)
    detail = value.get("detail")
    if isinstance(found, dict):
        found, detail = found.get("url"), found.get("detail", detail)
    if not isinstance(found, str) or not found:
        raise field_error(
            f"expected a part of type {kind} with a URL in {fields[0]}", "add the URL"
        )
    if detail is not None and detail not in DETAILS:
        raise field_error(
            f"detail: expected one of {', '.join(DETAILS)}", "use one of these, or leave detail out"
        )
    return {"type": kind, "text": "", "image_url": found, "detail": detail}


def _video(value: Any) -> Any:
    """Convert a video part to the common form: its URL in `video_url`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in VIDEO_FIELDS:
        return value
    fields = VIDEO_FIELDS[kind]
    found = next((value[name] for name in fields if value.get(name) is not None), None)
    if isinstance(found, dict):
        found = found.get("url")
    if not isinstance(found, str) or not found:
        raise field_error(
            f"expected a part of type {kind} with a URL in {fields[0]}", "add the URL"
        )
    return {"type": kind, "text": "", "video_url": found}


def _check_kind(kind: str, known: tuple[str, ...], image: str) -> str:
    if kind in OTHER_MEDIA:
        raise field_error(f"{kind} is not supported", OTHER_MEDIA[kind])
    if kind not in (*known, *IMAGE_FIELDS, *VIDEO_FIELDS):
        text = "input_text" if image == "input_image" else "text"
        raise field_error(
            f"expected a part of type {text} or {image}", "convert it to one of these"
        )
    return kind


def _text_kind(kind: str) -> str:
    return _check_kind(kind, (*INPUT_KINDS, REFUSAL, THINKING), "image_url")


def _input_kind(kind: str) -> str:
    return _check_kind(kind, (*INPUT_KINDS, REFUSAL), "input_image")


class Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str  # "" for an image or a video
    image_url: str | None = None
    video_url: str | None = None
    detail: str | None = None  # detail of an image

    @property
    def is_image(self) -> bool:
        return self.type in IMAGE_FIELDS

    @property
    def kind(self) -> str:
        """One of settings.KINDS, or "text"."""
        if self.is_image:
            return "image"
        return "video" if self.type in VIDEO_FIELDS else "text"

    @property
    def media_url(self) -> str | None:
        """URL of the image or video; None for other parts."""
        if self.is_image:
            return self.image_url
        return self.video_url if self.kind == "video" else None

    @property
    def has_detail(self) -> bool:
        """True if the part sets an image's `detail`, which has no effect."""
        return self.is_image and self.detail not in (None, "auto")


class ChatPart(Part):
    type: Annotated[str, AfterValidator(_text_kind)]


class ResponsePart(Part):
    type: Annotated[str, AfterValidator(_input_kind)]


TextPart = Annotated[
    ChatPart,
    BeforeValidator(_refusal),
    BeforeValidator(_thinking),
    BeforeValidator(image_part),
    BeforeValidator(_video),
]
InputPart = Annotated[
    ResponsePart, BeforeValidator(_refusal), BeforeValidator(image_part), BeforeValidator(_video)
]


def check_parts_of_role(role: str, parts: Sequence[Part] | None) -> None:
    """Raise PydanticCustomError for a part that messages of this role cannot have."""
    for part in parts or ():
        if part.media_url and role not in (USER, TOOL):
            raise field_error(
                f"expected {part.kind}s in messages of role user or tool", "move it there"
            )
        if role != ASSISTANT and part.type in (REFUSAL, THINKING):
            raise field_error(
                f"expected parts of type {part.type} only in messages of role assistant",
                "move it there",
            )
