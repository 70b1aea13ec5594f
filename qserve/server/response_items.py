"""The items of a response: messages, reasoning, calls of tools; whole, and as a stream's events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.output_parser import Message
from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, REASONING, Piece
from qserve.server.chat_message import new_call_id
from qserve.server.response_logprobs import without_bytes

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
MESSAGE, CALL = "message", "function_call"
PREFIXES = {MESSAGE: "msg_", REASONING: "rs_", CALL: "fc_"}
# of the items that hold text: the type of their part, and their events' names
TEXTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
KINDS = {CONTENT: MESSAGE, REASONING: REASONING}


@dataclass(slots=True, kw_only=True)
class Item:
    """One item while its text comes."""

    kind: str
    number: int  # of the response's items
    name: str = ""  # of a called tool
    call_id: str = ""
    text: str = ""  # of a call, its arguments
    logprobs: list[dict] = field(default_factory=list)  # of a message, where asked for
    status: str = IN_PROGRESS

    def fields(self, key: str) -> dict[str, Any]:
        """The item as it is now. `key` makes its id unique."""
        common = {"id": PREFIXES[self.kind] + key, "type": self.kind, "status": self.status}
        if self.number:
            common["id"] += f"-{self.number}"
        if self.kind == CALL:
            return common | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if self.status == IN_PROGRESS else [self.part(self.text)]
        if self.kind == REASONING:
            return common | {"summary": [], "content": content}
        return common | {"role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": TEXTS[self.kind], "text": text}
        if self.kind == REASONING:
            return part
        return part | {"annotations": [], "logprobs": self.logprobs if text else []}


@dataclass(slots=True, kw_only=True)
class Items:
    """All items of a response, in their order. `key` makes ids unique."""

    key: str
    call_ids: Any = None  # ParseSettings, which say what ids of calls are like; None: no calls
    done: list[Item] = field(default_factory=list)
    _open: Item | None = None

    @property
    def fields(self) -> list[dict[str, Any]]:
        return [item.fields(self.key) for item in self.done]

    def add_whole(self, found: Message, status: str, logprobs: list[dict]) -> None:
        """The items of a whole text; `status`: how the last of them ended.

        `logprobs` are its message's.
        """
        parts = [(REASONING, found.reasoning)] if found.reasoning else []
        if found.content or not found.calls:
            parts.append((MESSAGE, found.content))
        for kind, text in parts:
            item = Item(kind=kind, number=len(self.done), text=text, status=COMPLETED)
            item.logprobs = logprobs if kind == MESSAGE else []
            self.done.append(item)
        for name, arguments in found.calls:
            self._open_item(CALL, name)
            self._open.text, self._open.status = arguments, COMPLETED
            self.done.append(self._open)
        self._open = None
        self.done[-1].status = status

    def take(
        self, piece: Piece, logprobs: Sequence[dict] = ()
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of a piece: their names and fields. `logprobs` are those of its tokens."""
        kind, text, _ = piece
        if kind == NAME:
            yield from self.close()
            yield from self._begin(CALL, text)
        elif kind == BROKEN:
            yield from self.close(INCOMPLETE)  # what was sent of it cannot be taken back
        elif kind == ARGUMENTS:
            yield from self._add(text, "function_call_arguments.delta")
        else:
            kind = KINDS[kind]
            if self._open is None or self._open.kind != kind:
                yield from self.close()
                yield from self._begin(kind)
            yield from self._add(text, f"{TEXTS[kind]}.delta", logprobs)

    def end(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events after the last piece; a response has one item at least."""
        if self._open is None and not self.done:
            yield from self._begin(MESSAGE)
        yield from self.close(status)

    def close(self, status: str = COMPLETED) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events that end the item whose text came last, if it is not ended."""
        item, self._open = self._open, None
        if item is None:
            return
        place = self._place(item)
        item.status = status
        self.done.append(item)
        if item.kind == CALL:
            yield (
                "function_call_arguments.done",
                {**place, "name": item.name, "arguments": item.text},
            )
        else:
            more = {} if item.kind == REASONING else {"logprobs": without_bytes(item.logprobs)}
            yield f"{TEXTS[item.kind]}.done", {**place, "text": item.text, **more}
            yield "content_part.done", {**place, "part": item.part(item.text)}
        fields = {"output_index": item.number, "item": item.fields(self.key)}
        yield "output_item.done", fields

    def _begin(self, kind: str, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        item = self._open_item(kind, name)
        fields = {"output_index": item.number, "item": item.fields(self.key)}
        yield "output_item.added", fields
        if kind != CALL:
            yield "content_part.added", {**self._place(item), "part": item.part("")}

    def _open_item(self, kind: str, name: str = "") -> Item:
        call_id = new_call_id(self.call_ids) if kind == CALL else ""
        number = len(self.done)
        self._open = Item(kind=kind, number=number, name=name, call_id=call_id)
        return self._open

    def _add(
        self, text: str, event: str, logprobs: Sequence[dict] = ()
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        item = self._open
        item.text += text
        item.logprobs += logprobs
        more = {"logprobs": without_bytes(logprobs)} if item.kind == MESSAGE else {}
        yield event, {**self._place(item), "delta": text, **more}

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"output_index": item.number, "item_id": item.fields(self.key)["id"]}
        return place if item.kind == CALL else {**place, "content_index": 0}
