"""Which rows of the workers' tables belong to which request. Knows row numbers, not what they hold.

The workers know no requests: a step tells them rows.
"""

from collections.abc import Iterable

from qserve.engine.request import Request, Status


class RequestRows:
    """Rows of the samples in flight, and of the table of token counts that penalties need."""

    def __init__(self, num_history_rows: int) -> None:
        self._num_history_rows = num_history_rows
        self._history: dict[Request, int] = {}
        self._sampled: dict[Request, int] = {}

    def take_sampled(self, owners: Iterable[Request]) -> None:
        """Note whose rows the newest step samples, in order. A request's last row counts."""
        self._sampled = {request: row for row, request in enumerate(owners)}

    def sampled_row(self, request: Request) -> int:
        """The row of the newest step that holds the request's token in flight."""
        return self._sampled[request]

    def history_row(self, request: Request) -> tuple[int, bool]:
        """The request's row of token counts, and whether it is new and has to be filled.

        A request keeps its row while it runs. One that was preempted may lose it.
        """
        row = self._history.get(request)
        if row is not None:
            return row, False
        for owner in [r for r in self._history if r.status is not Status.RUNNING]:
            del self._history[owner]
        used = set(self._history.values())
        row = next(row for row in range(self._num_history_rows) if row not in used)
        self._history[request] = row
        return row, True
