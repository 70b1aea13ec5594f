"""The bodies of requests for vectors and scores: fields and types."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator
from pydantic_core import PydanticCustomError

from qserve.server.protocol import (
    MAX_NAME_CHARS,
    ONE_ERROR,
    PROMPT_FORMS,
    Body,
    CacheSalt,
    at_most,
    check_request_id,
)

MAX_INPUTS = 2048  # OpenAI's


def _inputs(value: Any) -> list[str | list[int]]:
    """All forms of `input` as a list, each item text or token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise PydanticCustomError("input", f"expected {PROMPT_FORMS}")
    if not 1 <= len(value) <= MAX_INPUTS:
        raise PydanticCustomError("input", f"expected 1 to {MAX_INPUTS} inputs, found {len(value)}")
    for item in value:
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not is_ids:
            raise PydanticCustomError("input", f"expected {PROMPT_FORMS}")
        if not item:
            raise PydanticCustomError("input", "expected no empty input")
    return value


def _text_of(value: Any) -> Any:
    """A document's text: itself, or the field `text` of an object."""
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return value


def _not_empty(value: str) -> str:
    if not value:
        raise PydanticCustomError("text", "expected no empty text")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _some(value: list[str]) -> list[str]:
    if not value:
        raise PydanticCustomError("texts", "expected at least one text")
    return value


def _top_n(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise PydanticCustomError("top_n", "expected 0, for all, or more")
    return value


Text = Annotated[str, BeforeValidator(_text_of), AfterValidator(_not_empty)]
Texts = Annotated[list[Text], ONE_ERROR, at_most(MAX_INPUTS, "texts"), BeforeValidator(_as_list)]


class PooledRequest(Body):
    """What all of them take. None is a field that is not set."""

    model: str | None = None
    request_id: Annotated[str | None, AfterValidator(check_request_id)] = None
    user: str | None = None
    priority: int | None = None
    cache_salt: CacheSalt = None
    truncate_prompt_tokens: int | None = None


class EmbeddingRequest(PooledRequest):
    """The body of POST /v1/embeddings."""

    input: Annotated[Any, AfterValidator(_inputs)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str | None, at_most(MAX_NAME_CHARS, "characters")] = None
    add_special_tokens: bool | None = None


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ScoreRequest(PooledRequest):
    """The body of POST /score: one text with each of several, or pair by pair."""

    text_1: Texts
    text_2: Texts
    instruction: str | None = None


class RerankRequest(PooledRequest):
    """The body of POST /rerank."""

    query: Text
    documents: Annotated[Texts, AfterValidator(_some)]
    top_n: Annotated[int | None, AfterValidator(_top_n)] = None
    return_documents: bool | None = None
    instruction: str | None = None
