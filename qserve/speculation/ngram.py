"""NgramDrafter: what followed the newest tokens where they stood before. Knows token ids alone.

Prompt lookup (vLLM's `ngram`): the longest suffix of prompt and output, of prompt_lookup_min to
prompt_lookup_max tokens, that stands there earlier, too; what follows it is the draft. Of several
places the earliest counts, as in vLLM's drafter of the host.
"""

from collections.abc import Sequence

from qserve.speculation.config import SpeculativeConfig


class _Places:
    """Of one sequence: where each run of n tokens stands first. It grows with the sequence."""

    def __init__(self, low: int, high: int) -> None:
        self._first: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(low, high + 1)}
        self._num_known = 0

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The position behind the earliest place of the longest suffix that is there twice."""
        length, found = len(token_ids), None
        for n, first in self._first.items():
            for end in range(max(n, self._num_known + 1), length + 1):
                first.setdefault(tuple(token_ids[end - n : end]), end)
            if length > n:
                end = first[tuple(token_ids[length - n :])]
                found = end if end < length else found
        self._num_known = length
        return found


class NgramDrafter:
    """A HostDrafter. What it keeps grows by an entry for each token and length compared."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._range = config.prompt_lookup_min, config.prompt_lookup_max
        self._places: dict[str, _Places] = {}

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """As HostDrafter."""
        places = self._places.get(request_id)
        if places is None:
            places = self._places[request_id] = _Places(*self._range)
        start = places.find(token_ids)
        return [] if start is None else list(token_ids[start : start + most])

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """As HostDrafter."""
        self._places.pop(request_id, None)
