"""Records: operations on responses, conversations and their items.

An operation that writes is one transaction. Operations run in the store's thread. Bodies and items
are JSON objects.
"""

import contextlib
import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from qserve.server.http.errors import ApiError
from qserve.server.store.database import RECORD_BYTES, Database
from qserve.server.store.errors import not_found

RESPONSE, CONVERSATION, ITEM = "response", "conversation", "item"
ASCENDING, DESCENDING = "asc", "desc"
Item = tuple[str, bytes]  # id and JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The page of a list that a client requests."""

    after: str | None = None
    limit: int = 20
    order: str = DESCENDING


def encoded(items: Sequence[dict[str, Any]]) -> list[Item]:
    return [(item["id"], msgspec.json.encode(item)) for item in items]


class Records:
    """Operations on the records of a database. `owner`: digest of the client's API key."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def save_response(
        self,
        owner: str,
        response: dict[str, Any],
        input_items: Sequence[dict[str, Any]],
        conversation: str | None,
        *,
        stores_response: bool,
    ) -> None:
        """Store a response with its items, and append the items to a conversation."""
        output = encoded(response["output"])
        given = encoded(input_items)
        with self._database.transaction():
            if conversation is not None:
                self._append(owner, conversation, given, output)
            if stores_response:
                body = {name: response[name] for name in response if name != "output"}
                self._save(
                    owner, response["id"], body, given, output, response["previous_response_id"]
                )

    def response(self, owner: str, name: str) -> bytes:
        """Return the JSON of a response. Raises ApiError(404)."""
        body = self._body(owner, name, RESPONSE)
        items = self._database.rows(
            "SELECT body FROM items WHERE owner = ? AND record = ? AND is_output ORDER BY position",
            *(owner, name),
        )
        output = [msgspec.Raw(item) for (item,) in items]
        return msgspec.json.encode(msgspec.json.decode(body) | {"output": output})

    def delete(self, owner: str, name: str, kind: str) -> None:
        """Delete a response or a conversation with its items. Raises ApiError(404)."""
        with self._database.transaction():
            self._body(owner, name, kind)
            self._database.run("DELETE FROM records WHERE owner = ? AND id = ?", owner, name)

    def history(self, owner: str, previous: str) -> list[bytes]:
        """Return the items of a response and of the responses before it, oldest first.

        Raises ApiError(404).
        """
        names = self._chain(owner, previous)
        found = [item for name in names for item in self._items(owner, name)]
        self._touch(owner, names)
        return found

    def conversation_items(self, owner: str, name: str) -> list[bytes]:
        """Return the items of a conversation. Raises ApiError(404)."""
        self._body(owner, name, CONVERSATION)
        found = self._items(owner, name)
        self._touch(owner, [name])
        return found

    def items_by_id(self, owner: str, names: Collection[str]) -> dict[str, bytes]:
        """Return id -> JSON for those of the ids that are stored."""
        found = {}
        for name in names:
            row = self._database.row(
                "SELECT body FROM items WHERE owner = ? AND id = ? LIMIT 1", owner, name
            )
            if row is not None:
                found[name] = row[0]
        return found

    def input_items(self, owner: str, name: str, page: Page) -> bytes:
        """Return a page of a response's input, with the responses before it. Raises ApiError."""
        earlier = self._chain(owner, name)[:-1]
        items = [item for each in earlier for item in self._named_items(owner, each)]
        return _page_of([*items, *self._named_items(owner, name, outputs=False)], page)

    def create_conversation(
        self, owner: str, name: str, metadata: dict[str, str], items: Sequence[dict[str, Any]]
    ) -> bytes:
        """Create a conversation. Returns its JSON."""
        body = {
            "id": name,
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": metadata,
        }
        with self._database.transaction():
            self._save(owner, name, body, encoded(items), [], None)
        return msgspec.json.encode(body)

    def conversation(self, owner: str, name: str) -> bytes:
        """Return the JSON of a conversation. Raises ApiError(404)."""
        return self._body(owner, name, CONVERSATION)

    def update_conversation(self, owner: str, name: str, metadata: dict[str, str]) -> bytes:
        """Replace the metadata of a conversation. Returns its JSON. Raises ApiError."""
        with self._database.transaction():
            old = self._body(owner, name, CONVERSATION)
            body = msgspec.json.encode(msgspec.json.decode(old) | {"metadata": metadata})
            self._grow(owner, name, len(body) - len(old))
            self._database.run(
                "UPDATE records SET body = ? WHERE owner = ? AND id = ?", body, owner, name
            )
        return body

    def add_items(self, owner: str, name: str, items: Sequence[dict[str, Any]]) -> bytes:
        """Append items to a conversation. Returns the JSON list of these items. Raises ApiError."""
        added = encoded(items)
        with self._database.transaction():
            self._append(owner, name, added, [])
        return _page_of(added, Page(limit=len(added) or 1, order=ASCENDING))

    def page(self, owner: str, name: str, page: Page) -> bytes:
        """Return a page of a conversation's items. Raises ApiError."""
        self._body(owner, name, CONVERSATION)
        return _page_of(self._named_items(owner, name), page)

    def item(self, owner: str, name: str, item: str) -> bytes:
        """Return the JSON of an item of a conversation. Raises ApiError(404)."""
        self._body(owner, name, CONVERSATION)
        row = self._database.row(
            "SELECT body FROM items WHERE owner = ? AND record = ? AND id = ?", owner, name, item
        )
        if row is None:
            raise not_found(ITEM, item)
        return row[0]

    def delete_item(self, owner: str, name: str, item: str) -> bytes:
        """Delete an item of a conversation. Returns the conversation. Raises ApiError(404)."""
        with self._database.transaction():
            size = _size([(item, self.item(owner, name, item))])
            self._database.run(
                "DELETE FROM items WHERE owner = ? AND record = ? AND id = ?", owner, name, item
            )
            self._grow(owner, name, -size)
            return self._body(owner, name, CONVERSATION)

    def _save(
        self,
        owner: str,
        name: str,
        body: dict[str, Any],
        given: list[Item],
        output: list[Item],
        previous: str | None,
    ) -> None:
        content = msgspec.json.encode(body)
        size = RECORD_BYTES + len(content) + _size(given) + _size(output)
        self._database.make_room(owner, name, size)
        now = time.time()
        self._database.run(
            "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)",
            *(owner, name, int(now), now, size, previous, content),
        )
        self._insert(owner, name, 0, given, output)

    def _append(self, owner: str, name: str, given: list[Item], output: list[Item]) -> None:
        self._body(owner, name, CONVERSATION)
        (last,) = self._database.row(
            "SELECT COALESCE(MAX(position), -1) FROM items WHERE owner = ? AND record = ?",
            *(owner, name),
        )
        self._grow(owner, name, _size(given) + _size(output))
        self._insert(owner, name, last + 1, given, output)

    def _grow(self, owner: str, name: str, num_bytes: int) -> None:
        """Make room for a record to grow by `num_bytes`, and update its size and time of use."""
        (size,) = self._database.row(
            "SELECT num_bytes FROM records WHERE owner = ? AND id = ?", owner, name
        )
        self._database.make_room(owner, name, size + num_bytes)
        self._database.run(
            "UPDATE records SET num_bytes = ?, used = ? WHERE owner = ? AND id = ?",
            *(size + num_bytes, time.time(), owner, name),
        )

    def _insert(
        self, owner: str, name: str, start: int, given: list[Item], output: list[Item]
    ) -> None:
        rows = [
            (owner, name, start + index, item_id, index >= len(given), body)
            for index, (item_id, body) in enumerate([*given, *output])
        ]
        self._database.run_each("INSERT INTO items VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _body(self, owner: str, name: str, kind: str) -> bytes:
        """Return the body of a record. Raises ApiError(404) if it is missing or has expired."""
        row = self._database.row(
            "SELECT body FROM records WHERE owner = ? AND id = ? AND used >= ?",
            *(owner, name, self._database.cutoff),
        )
        is_kind = name.startswith("conv_") == (kind == CONVERSATION)
        if row is None or not is_kind:
            raise not_found(kind, name)
        return row[0]

    def _chain(self, owner: str, last: str) -> list[str]:
        """Return the ids of the responses before `last`, oldest first, then `last`.

        Raises ApiError(404).
        """
        names: list[str] = []
        name: str | None = last
        while name is not None and name not in names:
            row = self._database.row(
                "SELECT previous FROM records WHERE owner = ? AND id = ? AND used >= ?",
                *(owner, name, self._database.cutoff),
            )
            if row is None and names:
                raise ApiError(
                    404,
                    f"The response {last[:100]!r} continues {name[:100]!r}, which was deleted or"
                    " has expired.",
                    "Send the whole conversation as input.",
                    "previous_response_id",
                )
            if row is None:
                raise not_found(RESPONSE, name, "previous_response_id")
            names.append(name)
            (name,) = row
        return names[::-1]

    def _touch(self, owner: str, names: Sequence[str]) -> None:
        """Mark records as used now. Do nothing if the file cannot be written: reads must work."""
        now = time.time()
        with contextlib.suppress(sqlite3.OperationalError), self._database.transaction():
            for name in names:
                self._database.run(
                    "UPDATE records SET used = ? WHERE owner = ? AND id = ?", now, owner, name
                )

    def _items(self, owner: str, name: str) -> list[bytes]:
        return [body for _, body in self._named_items(owner, name)]

    def _named_items(self, owner: str, name: str, *, outputs: bool = True) -> list[Item]:
        return self._database.rows(
            "SELECT id, body FROM items WHERE owner = ? AND record = ? AND is_output <= ?"
            " ORDER BY position",
            *(owner, name, outputs),
        )


def _size(items: list[Item]) -> int:
    return sum(len(name) + len(body) for name, body in items)


def _page_of(items: list[Item], page: Page) -> bytes:
    """Return the JSON of one page of items. Raises ApiError(400) for an unknown `after`."""
    if page.order == DESCENDING:
        items = items[::-1]
    if page.after is not None:
        names = [name for name, _ in items]
        if page.after not in names:
            raise ApiError(
                400,
                "after: expected the id of an item of this list.",
                "Give such an id, or leave after out.",
                "after",
            )
        items = items[names.index(page.after) + 1 :]
    shown = items[: page.limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [msgspec.Raw(body) for _, body in shown],
            "first_id": shown[0][0] if shown else None,
            "last_id": shown[-1][0] if shown else None,
            "has_more": len(shown) < len(items),
        }
    )
