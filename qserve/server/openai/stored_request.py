"""StoredRequest: reads the stored items that a request refers to, and stores the response."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from qserve.server.http.errors import ApiError
from qserve.server.requests.stored import StoredInput, stored_input
from qserve.server.service import Service
from qserve.server.store.items import stored_item
from qserve.server.store.records import Records
from qserve.server.store.store import ResponseStore

INPUT_INDEX = re.compile(r"\binput\.(\d+)")

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class StoredRequest:
    """One request with --response-store: call `expand` with the body, then `keep` at the end."""

    service: Service
    store: ResponseStore
    client: str
    owner: str  # digest of the client's API key
    num_history: int = 0  # number of stored items that `expand` put before the body's items
    _input: StoredInput | None = None
    _items: list[dict[str, Any]] = field(default_factory=list)

    async def expand(self, body: bytes | bytearray) -> bytes | bytearray:
        """Return the body with all stored items that it refers to. Raises ApiError.

        An invalid body is returned unchanged; its validation will report the problem.
        """
        run = self.service.preparation.run
        found = self._input = await run(self.client, stored_input, body)
        if found is None:
            return body
        history, referred = [], {}
        if found.previous is not None:
            history = await self.store.run(Records.history, self.owner, found.previous)
        elif found.conversation is not None:
            history = await self.store.run(
                Records.conversation_items, self.owner, found.conversation
            )
        if found.references:
            referred = await self.store.run(Records.items_by_id, self.owner, found.references)
            for index, item in enumerate(found.items):
                if item.get("id") in found.references and item["id"] not in referred:
                    raise ApiError(
                        404,
                        f"input.{index}: the item {item['id'][:100]!r} does not exist, or has"
                        " expired.",
                        "Send the item itself.",
                        f"input.{index}",
                    )
        self.num_history = len(history)
        num_bytes, limit = sum(map(len, history)), self.service.max_body_bytes
        if num_bytes + len(body) > limit:
            raise ApiError(
                400,
                f"The stored conversation has {num_bytes} bytes; conversation and body may have"
                f" at most {limit} bytes together.",
                "Shorten the body, or start a new conversation.",
                "input",
            )
        return await run(self.client, found.body, history, referred)

    @contextmanager
    def own_indices(self) -> Iterator[None]:
        """Change item indices in errors to those of the client's body, without the history."""

        def own(match: re.Match) -> str:
            return f"input.{max(0, int(match[1]) - self.num_history)}"

        try:
            yield
        except ApiError as error:
            param = None if error.param is None else INPUT_INDEX.sub(own, error.param)
            message = INPUT_INDEX.sub(own, error.message)
            raise ApiError.relayed(error.status, message, param, error.headers) from None

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the response object about storage."""
        found = self._input
        if found is None:
            return {}
        fields: dict[str, Any] = {
            "previous_response_id": found.previous,
            "store": found.stores,
        }
        if found.conversation is not None:
            fields["conversation"] = {"id": found.conversation}
        return fields

    async def keep(self, response: dict[str, Any]) -> str | None:
        """Store a finished response. Returns None, or a warning if the store fails.

        If the store fails, the client still gets the response, with `store` set to false.
        """
        found = self._input
        if found is None or not (found.stores or found.conversation):
            return None
        try:
            await self.store.run(
                Records.save_response,
                self.owner,
                response,
                [stored_item(item) for item in found.items],
                found.conversation,
                stores_response=found.stores,
            )
        except ApiError as error:
            logger.warning("Response %s was not stored: %s", response["id"], error.message)
            response["store"] = False
            return f"store: the response was not stored. {error.message}"
        return None
