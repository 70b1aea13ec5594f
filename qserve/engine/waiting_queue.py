"""The requests that wait for pages, in the order in which they are admitted. Knows no pages."""

from collections import deque
from collections.abc import Iterator

from qserve.engine.request import Request


class WaitingQueue:
    """First come, first served; a request that was pushed out goes before all others."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self.num_tokens = 0  # of all that wait, prompt and output

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be admitted."""
        return iter(self._requests)

    def first(self) -> Request | None:
        """The next to be admitted, or None."""
        return self._requests[0] if self._requests else None

    def push(self, request: Request) -> None:
        """Queue a new request."""
        self._requests.append(request)
        self.num_tokens += request.num_tokens

    def push_front(self, request: Request) -> None:
        """Put back a request that lost its pages."""
        self._requests.appendleft(request)
        self.num_tokens += request.num_tokens

    def pop(self) -> Request:
        """Take the first."""
        request = self._requests.popleft()
        self.num_tokens -= request.num_tokens
        return request

    def remove(self, request: Request) -> None:
        """Take one that will not run."""
        self._requests.remove(request)
        self.num_tokens -= request.num_tokens

    def check_integrity(self) -> None:
        """Assert that the count is of what waits."""
        if sum(request.num_tokens for request in self) != self.num_tokens:
            raise AssertionError(f"{self.num_tokens} waiting tokens are not what waits")
