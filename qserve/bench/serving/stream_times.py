"""StreamTimes: arrival times of the tokens in one streamed reply in OpenAI's event format.

A chunk counts if it has new tokens. Signs of new tokens are text, reasoning, a tool call,
`token_ids`, or a higher token count in `usage`. An empty text is another sign: servers send it for
a token whose text is held back. Chunks that only begin or end a reply do not count.
"""

import json
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class StreamTimes:
    """The contents of one streamed reply, with times as values of time.perf_counter()."""

    token_times: list[float] = field(default_factory=list)  # time of each chunk with tokens
    first_choice: float | None = None  # time of the first chunk with a choice
    last_choice: float | None = None  # time of the last one
    text: list[str] = field(default_factory=list)
    completion_tokens: int | None = None  # number of output tokens, as the server counts them
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    error: str = ""
    is_done: bool = False
    body: bytearray = field(default_factory=bytearray)  # start of the body, for error messages
    _rest: bytes = b""

    def feed(self, piece: bytes, when: float) -> None:
        """Process a piece of the reply's body, which arrived at time `when`."""
        if not self.is_done and len(self.body) < 4096:
            self.body += piece[:4096]
        data = self._rest + piece if self._rest else piece
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._take(event, when)

    def _take(self, event: bytes, when: float) -> None:
        if not event.startswith(b"data:"):
            lines = [line[5:] for line in event.split(b"\n") if line.startswith(b"data:")]
            if not lines:
                return  # a keep-alive comment
            payload = b"".join(lines).strip()
        else:
            payload = event[5:].strip()
        if payload == b"[DONE]":
            self.is_done = True
            return
        try:
            content = json.loads(payload)
        except ValueError:
            self.error = self.error or f"an event is not JSON: {payload[:200]!r}"
            return
        if content.get("error"):
            problem = content["error"]
            self.error = str(
                problem.get("message", problem) if isinstance(problem, dict) else problem
            )
            return
        rose = self._take_usage(content.get("usage"))
        for choice in content.get("choices") or ():
            self._take_choice(choice, rose, when)

    def _take_usage(self, usage: dict | None) -> bool:
        """Return True if the number of output tokens rose."""
        if not usage:
            return False
        before, now = self.completion_tokens or 0, usage.get("completion_tokens")
        if now is not None:
            self.completion_tokens = now
        if usage.get("prompt_tokens") is not None:
            self.prompt_tokens = usage["prompt_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            self.cached_tokens = details["cached_tokens"]
        return (now or 0) > before

    def _take_choice(self, choice: dict, rose: bool, when: float) -> None:
        if self.first_choice is None:
            self.first_choice = when
        self.last_choice = when
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        others = delta.get("reasoning_content") or delta.get("reasoning") or ""
        if text or others:
            self.text.append(text or others)
        has_tokens = text or others or rose or choice.get("token_ids") or delta.get("tool_calls")
        is_empty = "text" in choice or ("content" in delta and "role" not in delta)
        held_back = is_empty and not text and not choice.get("finish_reason")
        if has_tokens or held_back or delta.get("token_ids"):
            self.token_times.append(when)
        if choice.get("finish_reason"):
            self.finish_reason = choice["finish_reason"]
