"""Clients that send requests all the time and check the replies."""

import contextlib
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator

from server import Answer, Server, Wrong
from weights import OLD, Weights

NUM_PROMPTS = 8
RETRY_SECONDS = 0.02  # instead of Retry-After, which would leave the server idle
WAIT_SECONDS = 180.0


def prompt(number: int) -> list[int]:
    """Token ids of a prompt."""
    return [(7 * number + 3 * i) % 500 + 3 for i in range(4 + 3 * number)]


class Load:
    """Clients that send requests until they are stopped; counts of their replies."""

    def __init__(self, server: Server, weights: Weights, *, refuses: bool, clients: int) -> None:
        self.server, self.weights, self._refuses = server, weights, refuses
        self.history = [OLD]  # weights that were in use, in order
        self.is_changing = False  # True: the last or the second last of the history is in use
        self.num_aborts = 0  # times that all requests were aborted, counted when it begins
        self.num_kills = 0  # each kill counts twice: when it begins, and when it is over
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.messages: set[str] = set()  # error messages of requests that failed at a kill
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(number),))
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def changing(self, which: int) -> Iterator[None]:
        """Mark that the weights may change inside the block, and have changed after it."""
        self.history.append(which)
        self.is_changing = True
        yield
        self.is_changing = False

    def stop(self) -> None:
        """End each client after its current request. Raises Wrong if one got no reply."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            if thread.is_alive():
                raise Wrong("a request got no reply")

    def wait_for_replies(self, count: int) -> None:
        """Return when `count` more requests have ended as they should."""
        wanted, deadline = self._num_good() + count, time.monotonic() + WAIT_SECONDS
        while self._num_good() < wanted:
            self.check()
            if time.monotonic() > deadline:
                raise Wrong("no request ended")
            time.sleep(0.002)

    def _num_good(self) -> int:
        return self.counts["compared"] + self.counts["compared across an update"]

    def check(self) -> None:
        """Raise Wrong if a client found something wrong."""
        if self.problems:
            raise Wrong(self.problems[0])

    def _run(self, chance: random.Random) -> None:
        while not self._is_over.is_set():
            try:
                self._request(chance)
            except Exception as error:
                self.problems.append(f"{type(error).__name__}: {error}")
                return

    def _request(self, chance: random.Random) -> None:
        given, count = prompt(chance.randrange(NUM_PROMPTS)), chance.choice((4, 12, 24))
        first = len(self.history) - (2 if self.is_changing else 1)
        aborts, kills = self.num_aborts, self.num_kills
        answer = self.server.complete(given, count, stream=chance.random() < 0.5)
        could_abort, could_fail = aborts != self.num_aborts, kills != self.num_kills or kills % 2
        order = self.history[first:]
        if could_fail and answer.error:
            self.counts["failed at a kill"] += 1
            self.messages.add(answer.error)
            time.sleep(RETRY_SECONDS)
        elif self._refuses and answer.status == 503 and answer.retry_after:
            self.counts["refused"] += 1
            time.sleep(RETRY_SECONDS)
        elif answer.error:
            raise Wrong(f"a request was lost: {answer.error}")
        elif could_fail:
            self.counts["near a kill"] += 1  # which weights were in use is not known
        else:
            self._compare(given, count, answer, order, could_abort)

    def _compare(
        self, given: list[int], count: int, answer: Answer, order: list[int], may_abort: bool
    ) -> None:
        is_short = answer.finish == "abort" and may_abort
        if not is_short and (answer.finish != "length" or len(answer.tokens) != count):
            raise Wrong(f"{len(answer.tokens)} of {count} tokens, finish {answer.finish}")
        if not self.weights.explain(given, answer.tokens, order, count):
            raise Wrong(f"{given} gave {answer.tokens}, which weights {order} do not give")
        kind = "compared" if len(set(order)) == 1 else "compared across an update"
        self.counts["aborted" if is_short else kind] += 1
