"""Content blocks of messages: text, images, documents, tool calls and results, reasoning.

Fields that do not change the prompt, such as `cache_control` and citations, are ignored.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag

from qserve.server.requests.field_errors import field_error
from qserve.server.requests.protocol import MAX_PARTS, ONE_ERROR, Body, at_most

TEXT, IMAGE, TOOL_RESULT, TOOL_USE = "text", "image", "tool_result", "tool_use"
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
# A tool's error text that matches gets no "Error:" in front.
REPORTS_ERROR = re.compile(r"\s*(\[?error\b|<tool_use_error>)", re.IGNORECASE)


def joined(*texts: str | None) -> str:
    """Join the non-empty texts, one per line."""
    return "\n".join(filter(None, texts))


def as_blocks(value: Any) -> Any:
    """Convert a text to a list with one text block."""
    return [{"type": TEXT, "text": value}] if isinstance(value, str) else value


class TextBlock(Body):
    type: Literal["text"]
    text: str


class ImageBlock(Body):
    """An image. Its source is base64 text or a URL."""

    type: Literal["image"]
    source: Annotated[str, BeforeValidator(lambda value: _image_url(value))]

    @property
    def url(self) -> str:
        return self.source


class Document(Body):
    """A document. Its source is text; PDF files and uploaded files are refused."""

    type: Literal["document"]
    source: Annotated[Any, BeforeValidator(lambda value: _document_text(value))]
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return joined(self.title, self.context, self.source)


class SearchResult(Body):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], ONE_ERROR, at_most(MAX_PARTS, "blocks")]

    @property
    def text(self) -> str:
        return joined(self.title, self.source, *(block.text for block in self.content))


class ToolReference(Body):
    """The name of a tool that a tool search found. The prompt has all tools already."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ThinkingBlock(Body):
    """Reasoning of an earlier reply. Its signature is not verified."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Body):
    """Encrypted reasoning from another server. It is dropped, since the model cannot read it."""

    type: Literal["redacted_thinking"]


class ToolUse(Body):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    """Output of a called tool."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        "list[ResultBlock] | None",
        ONE_ERROR,
        at_most(MAX_PARTS, "blocks"),
        BeforeValidator(as_blocks),
    ] = None
    is_error: bool | None = None

    @property
    def images(self) -> list[ImageBlock]:
        return [block for block in self.content or () if block.type == IMAGE]

    @property
    def text(self) -> str:
        """The output for the prompt. Errors get "Error:", since chat templates do not mark them."""
        texts = (block.text for block in self.content or () if block.type != IMAGE)
        text = joined(*texts)
        if self.is_error and not REPORTS_ERROR.match(text):
            return f"Error: {text}" if text else "Error"
        return text


def _image_url(source: Any) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "base64":
        media_type, data = source.get("media_type"), source.get("data")
        if (
            isinstance(media_type, str)
            and media_type.startswith("image/")
            and isinstance(data, str)
        ):
            return f"data:{media_type};base64,{data}"
    if kind == "url" and isinstance(source.get("url"), str):
        return source["url"]
    if kind == "file":
        raise field_error("file: this server stores no files", "send the image")
    raise field_error(
        "expected a source of type base64 with media_type and data, or of type url with url",
        "send one of the two",
    )


def _document_text(source: Any) -> str:
    kind = source.get("type") if isinstance(source, dict) else None
    found = {"text": "data", "content": "content"}.get(kind if isinstance(kind, str) else "")
    value = source.get(found) if found else None
    if isinstance(value, str):
        return value
    blocks = value if isinstance(value, list) else []
    texts = [block.get("text") if isinstance(block, dict) else None for block in blocks]
    if texts and all(isinstance(text, str) for text in texts):
        return joined(*texts)
    raise field_error(
        "expected a source of type text, or of type content with text blocks; PDF files are not"
        " read",
        "send their text, or their pages as images",
    )


def _kind_of(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return kind if isinstance(kind, str) else ""


def _one_of(*kinds: str) -> Discriminator:
    return Discriminator(
        _kind_of,
        custom_error_type="block",
        custom_error_message=f"expected a block of type {', '.join(kinds)}",
    )


ResultBlock = Annotated[
    Annotated[TextBlock, Tag(TEXT)]
    | Annotated[ImageBlock, Tag(IMAGE)]
    | Annotated[Document, Tag("document")]
    | Annotated[SearchResult, Tag("search_result")]
    | Annotated[ToolReference, Tag("tool_reference")],
    _one_of(TEXT, IMAGE, "document", "search_result", "tool_reference"),
]
ROLES_OF = {
    TEXT: (USER, ASSISTANT, SYSTEM),
    IMAGE: (USER,),
    "document": (USER,),
    "search_result": (USER,),
    TOOL_RESULT: (USER,),
    TOOL_USE: (ASSISTANT,),
    "thinking": (ASSISTANT,),
    "redacted_thinking": (ASSISTANT,),
}
Block = Annotated[
    Annotated[TextBlock, Tag(TEXT)]
    | Annotated[ImageBlock, Tag(IMAGE)]
    | Annotated[Document, Tag("document")]
    | Annotated[SearchResult, Tag("search_result")]
    | Annotated[ToolResult, Tag(TOOL_RESULT)]
    | Annotated[ToolUse, Tag(TOOL_USE)]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinking, Tag("redacted_thinking")],
    _one_of(*ROLES_OF),
]
ToolResult.model_rebuild()
# Block types, which pydantic adds as tags to the path of an error.
TAGS = frozenset((*ROLES_OF, "tool_reference"))


def check_blocks_of_role(role: str, blocks: list[Any]) -> None:
    """Raise PydanticCustomError for a block that messages of this role cannot have."""
    for block in blocks:
        if role not in ROLES_OF[block.type]:
            allowed = ", ".join(ROLES_OF[block.type])
            raise field_error(
                f"expected blocks of type {block.type} only in messages of role {allowed}",
                "move it there",
            )
