"""Requests for stored responses and conversations: bodies, page limits, references to items."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from qserve.server.http.errors import ApiError
from qserve.server.requests.input_items import TAG_OF_ITEM, InputItem
from qserve.server.requests.protocol import ONE_ERROR, Body, at_most, read

MAX_ITEMS = 20  # items of one body, OpenAI's limit
MAX_PAGE = 100
MAX_METADATA = 16
REFERENCE = "item_reference"

Items = Annotated[list[InputItem], ONE_ERROR, at_most(MAX_ITEMS, "items")]
Metadata = Annotated[dict[str, str], at_most(MAX_METADATA, "entries")]


class ConversationRequest(Body):
    """The body of POST /v1/conversations."""

    items: Annotated[list[InputItem] | None, ONE_ERROR, at_most(MAX_ITEMS, "items")] = None
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA, "entries")] = None


class ConversationUpdate(Body):
    """The body of POST /v1/conversations/{id}."""

    metadata: Metadata


class ConversationItems(Body):
    """The body of POST /v1/conversations/{id}/items."""

    items: Items


AnyStored = TypeVar("AnyStored", bound=Body)


def read_stored(body: bytes | bytearray, kind: type[AnyStored]) -> AnyStored:
    """Read a body. Raises ApiError(400); its field path has no pydantic tags."""
    try:
        return read(body, kind)
    except ApiError as error:
        texts = error.message, error.param or ""
        message, param = (TAG_OF_ITEM.sub(r"\1", text) for text in texts)
        raise ApiError.relayed(error.status, message, param or None) from None


def item_fields(items: list[InputItem] | None) -> list[dict[str, Any]]:
    """Convert validated items to JSON objects."""
    return [item.model_dump(exclude_none=True) for item in items or ()]


def page_limit(query: Mapping[str, str], default: int) -> int:
    text = query.get("limit", str(default))
    if not text.isdecimal() or not 1 <= int(text[:9]) <= MAX_PAGE:
        raise ApiError(
            400,
            f"limit: expected 1 to {MAX_PAGE}, found {text[:50]!r}.",
            "Give such a number, or leave limit out.",
            "limit",
        )
    return int(text)


@dataclass(slots=True, kw_only=True)
class StoredInput:
    """The items and references in a body of /v1/responses."""

    fields: dict[str, msgspec.Raw]  # the body's other fields
    previous: str | None = None  # id of the response to continue
    conversation: str | None = None
    stores: bool = True
    items: list[dict[str, Any]] = field(default_factory=list)

    @property
    def references(self) -> list[str]:
        """Ids of items that the input only refers to."""
        return [
            item["id"]
            for item in self.items
            if item.get("type") == REFERENCE and isinstance(item.get("id"), str)
        ]

    def body(self, history: list[bytes], referred: Mapping[str, bytes]) -> bytes:
        """Return the body with references resolved, and with the history before its own items."""
        self.items = [
            msgspec.json.decode(referred[item["id"]])
            if item.get("type") == REFERENCE and item.get("id") in referred
            else item
            for item in self.items
        ]
        whole = [*map(msgspec.Raw, history), *self.items]
        return msgspec.json.encode(self.fields | {"input": whole})


def stored_input(body: bytes | bytearray) -> StoredInput | None:
    """Read the items and references in a body. Raises ApiError(400) for an invalid reference.

    Returns None if the body is invalid in another way.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        given = {
            name: msgspec.json.decode(fields.pop(name))
            for name in ("previous_response_id", "conversation", "store")
            if name in fields
        }
        items = msgspec.json.decode(fields["input"]) if "input" in fields else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    previous, conversation = given.get("previous_response_id"), given.get("conversation")
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    for name, value in (("previous_response_id", previous), ("conversation", conversation)):
        if value is not None and not isinstance(value, str):
            raise ApiError(
                400,
                f"{name}: expected the id of a stored response or conversation.",
                f"Give an id, or leave {name} out.",
                name,
            )
    if previous is not None and conversation is not None:
        raise ApiError(
            400,
            "previous_response_id and conversation cannot both be set.",
            "Set only one of them.",
            "conversation",
        )
    stores = given.get("store")
    if stores is not None and not isinstance(stores, bool):
        raise ApiError(
            400, "store: expected true or false.", "Give true or false without quotes.", "store"
        )
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        return None
    return StoredInput(
        fields=fields,
        previous=previous,
        conversation=conversation,
        stores=stores is not False,
        items=items,
    )
