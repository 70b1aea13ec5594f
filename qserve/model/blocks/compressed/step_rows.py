"""StepRows: which tokens and windows the rows of a step read. Layers of a model share it.

T: rows of the step. W: tokens of the sliding window. N: windows that end in the step. E: entries.
"""

from typing import NamedTuple

import torch

from qkernels.attention.selected.order import rows_and_positions
from qserve.model.blocks.attention import StepInputs


class ClosedWindows(NamedTuple):
    """The windows whose last token is in the step."""

    first_N: torch.Tensor  # int64: position of the first token
    slots_NM: torch.Tensor  # int64: slots of the tokens of this window; with `before`: 2 M
    seen_NM: torch.Tensor  # bool: False: there is no such token, before the first window
    entry_N: torch.Tensor  # int64: index of the window's entry among those of all pages


class Seen(NamedTuple):
    """Entries of one kind that some rows see."""

    slots_TE: torch.Tensor  # int64: indices of entries of all pages
    seen_TE: torch.Tensor  # bool: False: the row does not see this one


class StepRows:
    """Requests, positions and slots of the rows of one step."""

    def __init__(self, step: StepInputs, page_size: int) -> None:
        self.step, self.page_size = step, page_size
        self.tables_RX = step.block_tables_RX
        requests_T, positions_T = rows_and_positions(step, len(step.positions_T))
        self.requests_T = requests_T.long()
        self.positions_T = torch.where(step.slots_T >= 0, positions_T, -1).long()
        self._closed: dict[tuple[int, bool], ClosedWindows] = {}

    def _pages(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the pages of tokens of requests, 0 for tokens that do not exist."""
        last = self.tables_RX.shape[1] - 1
        numbers = (positions // self.page_size).clamp(0, last)
        return torch.where(positions < 0, 0, self.tables_RX[requests, numbers].long())

    def _slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        offsets = positions.clamp(min=0) % self.page_size
        return self._pages(requests, positions) * self.page_size + offsets

    def window(self, rows: slice, size: int) -> Seen:
        """Return the last `size` tokens up to each row's own."""
        back_W = torch.arange(size - 1, -1, -1, device=self.positions_T.device)
        positions_TW = self.positions_T[rows, None] - back_W
        requests_T1 = self.requests_T[rows, None]
        return Seen(self._slots(requests_T1, positions_TW), positions_TW >= 0)

    def num_windows(self, rate: int) -> int:
        """Return an upper bound of the windows that a row sees."""
        return self.step.max_context_len // rate

    def counts(self, rate: int) -> torch.Tensor:
        """Return the number of complete windows up to each row's token, int64 [T]."""
        return (self.positions_T + 1) // rate

    def entries(self, rows: slice, rate: int) -> Seen:
        """Return the entries of all complete windows up to each row's token."""
        number_E = torch.arange(self.num_windows(rate), device=self.positions_T.device)
        seen_TE = number_E < self.counts(rate)[rows, None]
        last_E = (number_E + 1) * rate - 1
        places = self._entry_places(self.requests_T[rows, None], last_E, rate)
        return Seen(torch.where(seen_TE, places, 0), seen_TE)

    def _entry_places(self, requests: torch.Tensor, last: torch.Tensor, rate: int) -> torch.Tensor:
        """Return the places of the entries of windows, by their last token."""
        per_page = -(-self.page_size // rate)
        return self._pages(requests, last) * per_page + last % self.page_size // rate

    def closed(self, rate: int, *, with_before: bool) -> ClosedWindows:
        """Return the windows that end in the step. `with_before`: with the tokens before them.

        Waits for the device once a step and kind of windows.
        """
        key = (rate, with_before)
        if key not in self._closed:
            self._closed[key] = self._find_closed(rate, with_before)
        return self._closed[key]

    def _find_closed(self, rate: int, with_before: bool) -> ClosedWindows:
        positions_T = self.positions_T
        is_last_T = (positions_T >= 0) & ((positions_T + 1) % rate == 0)
        rows_N = is_last_T.nonzero()[:, 0]
        requests_N, last_N = self.requests_T[rows_N], positions_T[rows_N]
        size = 2 * rate if with_before else rate
        back_M = torch.arange(size - 1, -1, -1, device=positions_T.device)
        tokens_NM = last_N[:, None] - back_M
        return ClosedWindows(
            first_N=last_N - (rate - 1),
            slots_NM=self._slots(requests_N[:, None], tokens_NM),
            seen_NM=tokens_NM >= 0,
            entry_N=self._entry_places(requests_N, last_N, rate),
        )


class RowsOfStep:
    """The StepRows of the step that runs, made by its first layer."""

    def __init__(self) -> None:
        self._rows: StepRows | None = None

    def of(self, step: StepInputs, page_size: int) -> StepRows:
        """Return the rows of a step."""
        if self._rows is None or self._rows.step is not step:
            self._rows = StepRows(step, page_size)
        return self._rows
