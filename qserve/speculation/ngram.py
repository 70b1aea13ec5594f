"""NgramDrafter: prompt lookup (vLLM's `ngram`).

It looks for an earlier occurrence of the last tokens of prompt and output: of the longest suffix
with prompt_lookup_min to prompt_lookup_max tokens. The tokens after that occurrence are the draft.
If there are several occurrences, the earliest counts, as in vLLM's host drafter.
"""

from collections.abc import Sequence

from qserve.speculation.config import SpeculativeConfig


class _Occurrences:
    """First occurrence of each n-gram in one growing sequence."""

    def __init__(self, low: int, high: int) -> None:
        self._first: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in range(low, high + 1)}
        self._num_known = 0

    def find(self, token_ids: Sequence[int]) -> int | None:
        """Return the position after the earliest occurrence of the longest suffix that repeats."""
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
    """Drafts by prompt lookup. See HostDrafter.

    Its memory is one entry per token and n-gram length.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._range = config.prompt_lookup_min, config.prompt_lookup_max
        self._occurrences: dict[str, _Occurrences] = {}

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """See HostDrafter."""
        occurrences = self._occurrences.get(request_id)
        if occurrences is None:
            occurrences = self._occurrences[request_id] = _Occurrences(*self._range)
        start = occurrences.find(token_ids)
        return [] if start is None else list(token_ids[start : start + most])

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """See HostDrafter."""
        self._occurrences.pop(request_id, None)
