"""Session: one API of a server, whole or streamed, as tasks use it."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from qserve.agent_check import chat_api, messages_api, responses_api
from qserve.agent_check.conversation import Answer, Ask, expect
from qserve.commands.client_http import ServerClient, ServerError

# name: a module with PATH, body, whole and streamed
APIS: dict[str, ModuleType] = {
    "chat": chat_api,
    "responses": responses_api,
    "messages": messages_api,
}
IDLE_SECONDS = 20.0  # until a server must have ended requests whose clients left


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    client: ServerClient
    api: str  # one of APIS
    model: str
    streams: bool
    is_forced: bool
    max_tokens: int

    def ask(self, ask: Ask, *, streams: bool | None = None) -> Answer:
        """The answer to a request. Raises CheckFailed and ServerError."""
        api = APIS[self.api]
        if self.streams if streams is None else streams:
            with contextlib.closing(self._events(ask)) as events:
                return api.streamed(events)
        return api.whole(self.client.post(api.PATH, self._body(ask)))

    def begin(self, ask: Ask, num_events: int) -> None:
        """Read the first events of a streamed answer, then disconnect."""
        with contextlib.closing(self._events(ask)) as events:
            found = [*itertools.islice(events, num_events)]
        expect(len(found) == num_events, "the stream ended too early to be cancelled")

    def refusal(self, ask: Ask) -> str:
        """The message with which the server refuses a request. Raises CheckFailed."""
        try:
            self.ask(ask)
        except ServerError as error:
            return str(error)
        expect(False, "the server accepted an invalid request")
        return ""

    def until_idle(self, load: Callable[[], int | None]) -> None:
        """Wait until the server has ended cancelled requests, if it reports its load."""
        deadline = time.monotonic() + IDLE_SECONDS
        while (found := load()) and time.monotonic() < deadline:
            time.sleep(0.05)
        expect(not found, f"{found} cancelled requests are still running")

    def load(self) -> int | None:
        """Number of running outputs; None: the server does not report it."""
        try:
            return self.client.get_outside("/load")["server_load"]
        except (ServerError, KeyError, ValueError):
            return None

    def _events(self, ask: Ask) -> Iterator[dict[str, Any]]:
        return self.client.stream(APIS[self.api].PATH, self._body(ask))

    def _body(self, ask: Ask) -> dict[str, Any]:
        return APIS[self.api].body(ask) | {"model": self.model, "temperature": 0}


def names(calls: Iterable[Any]) -> list[str]:
    return [call.name for call in calls]
