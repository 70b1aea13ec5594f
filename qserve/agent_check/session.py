"""Session: sends the requests of tasks over one API of a server, streamed or not."""

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

# name of an API -> module with PATH, body, whole and streamed
APIS: dict[str, ModuleType] = {
    "chat": chat_api,
    "responses": responses_api,
    "messages": messages_api,
}
IDLE_SECONDS = 20.0  # a server must end requests of disconnected clients within this time


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    client: ServerClient
    api: str  # one of APIS
    model: str
    streams: bool
    is_forced: bool
    max_tokens: int

    def ask(self, ask: Ask, *, streams: bool | None = None) -> Answer:
        """Send a request and return the reply. Raises CheckFailed and ServerError."""
        api = APIS[self.api]
        if self.streams if streams is None else streams:
            with contextlib.closing(self._events(ask)) as events:
                return api.streamed(events)
        return api.whole(self.client.post(api.PATH, self._body(ask)))

    def begin(self, ask: Ask, num_events: int) -> None:
        """Send a request, read the first events of its stream, then disconnect."""
        with contextlib.closing(self._events(ask)) as events:
            found = [*itertools.islice(events, num_events)]
        expect(len(found) == num_events, "the stream ended too early to be cancelled")

    def refusal(self, ask: Ask) -> str:
        """Send a request that the server must refuse, and return the error message.

        Raises CheckFailed if the server accepts it.
        """
        try:
            self.ask(ask)
        except ServerError as error:
            return str(error)
        expect(False, "the server accepted an invalid request")
        return ""

    def until_idle(self, load: Callable[[], int | None]) -> None:
        """Wait until the server has ended cancelled requests. Does not wait if load is unknown."""
        deadline = time.monotonic() + IDLE_SECONDS
        while (found := load()) and time.monotonic() < deadline:
            time.sleep(0.05)
        expect(not found, f"{found} cancelled requests are still running")

    def load(self) -> int | None:
        """Return the number of running outputs; None: the server does not report it."""
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
