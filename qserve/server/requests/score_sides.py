"""Sides of the pairs of /score and /rerank: texts, or images for models that rank them."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from qserve.multimodal.media import MediaItem
from qserve.multimodal.reader import MAX_FEATURE_BYTES, MediaUrl, ReadMedia
from qserve.pooling import scoring
from qserve.server.http.errors import ApiError
from qserve.server.requests.content_parts import IMAGE_FIELDS, image_part
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.protocol import Body
from qserve.server.requests.served_model import ServedModel
from qserve.text.tokenizer import REPLACEMENT

FORMS = 'expected a text, or an image as {"type": "image_url", "image_url": {"url": ...}}'


class Picture(Body):
    """An image instead of a text."""

    image: str  # URL


def _side_of(value: Any) -> Any:
    """Convert the forms of one side: a text, an object with it, or an image as a content part."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        if len(value["content"]) != 1:
            raise field_error("expected one text or one image", "leave the others out")
        (value,) = value["content"]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("text"), str):
        return value["text"]
    kind = value.get("type")
    if isinstance(kind, str) and kind in IMAGE_FIELDS:
        return {"image": image_part(value)["image_url"]}
    if not isinstance(value.get("image"), str):
        raise field_error(FORMS, "send one of the two")
    return {"image": value["image"]}


def not_empty(value: str | Picture) -> str | Picture:
    """Return a side. Raises a validator's error if it has no text or no URL."""
    if not (value if isinstance(value, str) else value.image):
        raise field_error("expected a text that is not empty", "write one")
    return value


def as_list(value: Any) -> Any:
    """Return one side, or a content list of several (vLLM's form), as a list of sides."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        return value
    return value["content"] if isinstance(value.get("content"), list) else [value]


Side = Annotated[str | Picture, BeforeValidator(_side_of), AfterValidator(not_empty)]


def shown(side: str | Picture) -> dict[str, str]:
    """Return a document as the reply repeats it."""
    return {"text": side} if isinstance(side, str) else {"image": side.image}


def ranked_prompts(
    model: ServedModel, pairs: list[tuple[str | Picture, str | Picture]], name: str
) -> tuple[list[list[int]], list[tuple[MediaItem, ...]]]:
    """Return a ranker's prompt for each pair (query, document), and its images.

    `name`: the field with the documents, for errors. Raises ApiError and InputError.
    """
    prompts, media, size = [], [], 0
    for query, document in pairs:
        texts = [side if isinstance(side, str) else None for side in (query, document)]
        ids = scoring.ranked_tokens(model.tokenizer, *texts)
        found: tuple[MediaItem, ...] = ()
        urls = [side.image for side in (document, query) if isinstance(side, Picture)]
        if urls:
            model.check_takes(name)
            assert model.media is not None
            # One pair's images at a time, so that few are in memory.
            known: ReadMedia = {}
            ids, found = model.media.prepare(ids, [MediaUrl("image", url) for url in urls], known)
            size += sum(len(each.data) for item in found for each in item.features)
            if size > MAX_FEATURE_BYTES:
                raise ApiError(
                    400,
                    f"{name}: the images become more than {MAX_FEATURE_BYTES} bytes of pixels.",
                    "Send fewer or smaller ones.",
                    name,
                )
        prompts.append(ids)
        media.append(found)
    return prompts, media


def only_texts(
    pairs: list[tuple[str | Picture, str | Picture]], name: str
) -> list[tuple[str, str]]:
    """Return the pairs. Raises ApiError if one has an image."""
    if any(isinstance(side, Picture) for pair in pairs for side in pair):
        raise ApiError(
            400,
            f"{name}: this model scores texts only.",
            "Send texts, or serve a reranker that takes images, such as jina-reranker-m0.",
            name,
        )
    return [(str(first), str(second)) for first, second in pairs]


def shortened(model: ServedModel, text: str | Picture, limit: int) -> str | Picture:
    """Return the text of the first `limit` tokens of a text; images are not changed."""
    if isinstance(text, Picture):
        return text
    tokens = model.tokenizer.encode_plain(text)
    if len(tokens) <= limit:
        return text
    return model.tokenizer.decode(tokens[:limit], False).rstrip(REPLACEMENT)
