"""Builds the items of a response (messages, reasoning, tool calls), and their stream events."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from qserve.output_parsing.output_parser import Message, OutputParser
from qserve.output_parsing.pieces import ARGUMENTS, BROKEN, CONTENT, NAME, REASONING, Piece
from qserve.server.openai.chat_message import new_call_id
from qserve.server.openai.logprobs import Token, chat_logprobs
from qserve.text.tokenizer import Tokenizer

TokensOfPiece = tuple[Piece, Sequence[Token]]


class TokenPieces:
    """Splits an output's text into pieces as it arrives, and assigns tokens to content pieces.

    If the parser holds text back, the tokens of this text wait for the piece that it becomes part
    of. Tokens of reasoning, calls and markers are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, parser: OutputParser | None) -> None:
        self._tokenizer, self._parser = tokenizer, parser
        self._waiting: list[Token] = []

    def push(
        self, text: str, tokens: Iterable[Token], *, ending: str | None
    ) -> Iterator[TokensOfPiece]:
        """Add the next text with its tokens; yield the pieces that are now complete.

        `ending`: finish reason, if this is the last text; else None.
        """
        self._waiting += tokens
        if self._parser is None:
            tokens, self._waiting = self._waiting, []
            yield Piece(CONTENT, text), tokens
            return
        pieces = self._parser.push(text)
        if ending is not None:
            pieces += self._parser.finish(is_cut=ending == "length")
        for piece in pieces:
            yield piece, self._take(piece.text) if piece.kind == CONTENT else ()
        if pieces and pieces[-1].kind != CONTENT:
            self._waiting = []

    def _take(self, content: str) -> list[Token]:
        """Remove and return the waiting tokens of `content`. Tokens before it are markers."""
        texts = [self._tokenizer.token_text(token) for token, _ in self._waiting]
        start = max(0, "".join(texts).find(content))
        end, place, taken, num_done = start + len(content), 0, [], 0
        for token, text in zip(self._waiting, texts, strict=True):
            if place >= end:
                break
            num_done += 1
            if place + len(text) > start:
                taken.append(token)
            place += len(text)
        del self._waiting[:num_done]
        return taken


def entries(tokenizer: Tokenizer, tokens: Sequence[Token]) -> list[dict]:
    """Return log probabilities as a message's content part has them, with bytes per token."""
    return chat_logprobs(tokenizer, tokens)["content"]


def without_bytes(found: Sequence[dict]) -> list[dict]:
    """Return log probabilities as stream events have them."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [
                {"token": each["token"], "logprob": each["logprob"]}
                for each in entry["top_logprobs"]
            ],
        }
        for entry in found
    ]


COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
MESSAGE, CALL = "message", "function_call"
PREFIXES = {MESSAGE: "msg_", REASONING: "rs_", CALL: "fc_"}
# item type -> type of its content part, which is also part of the event names
TEXTS = {MESSAGE: "output_text", REASONING: "reasoning_text"}
KINDS = {CONTENT: MESSAGE, REASONING: REASONING}


@dataclass(slots=True, kw_only=True)
class Item:
    """One item of a response. Its text may still grow."""

    kind: str
    number: int  # index within the response
    name: str = ""  # name of the called tool
    call_id: str = ""
    text: str = ""  # arguments, if the item is a call
    logprobs: list[dict] = field(default_factory=list)  # for a message, if requested
    status: str = IN_PROGRESS

    def fields(self, key: str) -> dict[str, Any]:
        """Return the item's JSON object in its current state. `key` makes the id unique."""
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
    """All items of a response in order. `key` makes ids unique."""

    key: str
    call_ids: Any = None  # ParseSettings, which determine the form of call ids; None: no calls
    done: list[Item] = field(default_factory=list)
    _open: Item | None = None

    @property
    def fields(self) -> list[dict[str, Any]]:
        return [item.fields(self.key) for item in self.done]

    def add_whole(self, found: Message, status: str, logprobs: list[dict]) -> None:
        """Add the items of a whole output.

        status: status of the last item; the others are completed
        logprobs: log probabilities of the message
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
        """Yield the events of a piece as (name, fields). `logprobs`: of the piece's tokens."""
        kind, text, _ = piece
        if kind == NAME:
            yield from self.close()
            yield from self._begin(CALL, text)
        elif kind == BROKEN:
            yield from self.close(INCOMPLETE)  # events that were sent cannot be revoked
        elif kind == ARGUMENTS:
            yield from self._add(text, "function_call_arguments.delta")
        else:
            kind = KINDS[kind]
            if self._open is None or self._open.kind != kind:
                yield from self.close()
                yield from self._begin(kind)
            yield from self._add(text, f"{TEXTS[kind]}.delta", logprobs)

    def end(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events after the last piece. A response has at least one item."""
        if self._open is None and not self.done:
            yield from self._begin(MESSAGE)
        yield from self.close(status)

    def close(self, status: str = COMPLETED) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events that end the open item, if there is one."""
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
        num_calls = sum(item.kind == CALL for item in self.done)
        call_id = new_call_id(self.call_ids, name, num_calls) if kind == CALL else ""
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
