"""SuffixDrafter: suffix decoding (Oliaro et al., arXiv 2411.04975).

It proposes the most frequent continuation of the last tokens, in the request and in past outputs.
For each suffix that also occurs elsewhere, it follows the most frequent next token as long as the
product of the tokens' frequencies is at least suffix_decoding_min_token_prob. The sum of these
products is the score of the draft. The draft with the best score is returned.

There is no suffix tree. Only the newest MAX_OCCURRENCES occurrences of the last token, and of the
last three tokens, are compared, which bounds memory and time.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

from qserve.speculation.config import SpeculativeConfig

MAX_OCCURRENCES = 32
KEY_LENGTHS = (1, 3)


class _Occurrences:
    """Newest occurrences of each token, and of each triple of tokens, in some sequences."""

    def __init__(self) -> None:
        # last tokens -> (sequence, position after them)
        self._occurrences: dict[tuple[int, ...], deque[tuple[Sequence[int], int]]] = {}

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Add the occurrences in `tokens` that end at `start` or later, but not at its end."""
        for end in range(max(1, start), len(tokens)):
            for length in KEY_LENGTHS:
                if end >= length:
                    key = tuple(tokens[end - length : end])
                    found = self._occurrences.get(key)
                    if found is None:
                        found = self._occurrences[key] = deque(maxlen=MAX_OCCURRENCES)
                    found.append((tokens, end))

    def of(self, tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """Yield occurrences of the last tokens of a sequence. Some are yielded twice."""
        for length in KEY_LENGTHS:
            yield from self._occurrences.get(tuple(tokens[-length:]), ())


class SuffixDrafter:
    """Drafts by suffix decoding. See HostDrafter."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._max_depth = config.suffix_decoding_max_tree_depth
        self._max_outputs = config.suffix_decoding_max_cached_requests
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_share = config.suffix_decoding_min_token_prob
        self._live: dict[str, tuple[_Occurrences, list[int]]] = {}
        self._past = _Occurrences()
        self._outputs: OrderedDict[str, list[int]] = OrderedDict()  # oldest first
        self._num_dropped = 0

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """See HostDrafter."""
        if request_id not in self._live:
            self._live[request_id] = _Occurrences(), []
        occurrences, tokens = self._live[request_id]
        known = len(tokens)
        tokens += token_ids[known:]
        occurrences.add(tokens, known)
        own = self._best(occurrences, tokens, most)
        past = self._best(self._past, tokens, most)
        return max(own, past, key=lambda found: found[0])[1]

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """See HostDrafter. The request's output becomes a past output."""
        self._live.pop(request_id, None)
        output = list(token_ids[num_prompt_tokens:])
        if not self._max_outputs or not output:
            return
        if len(self._outputs) >= self._max_outputs:
            self._outputs.popitem(last=False)
            self._num_dropped += 1
        self._outputs[request_id] = output
        if self._num_dropped > self._max_outputs // 2:
            # Rebuild the index without dropped outputs once there are many of them.
            self._past, self._num_dropped = _Occurrences(), 0
            for each in self._outputs.values():
                self._past.add(each, 0)
        else:
            self._past.add(output, 0)

    def _best(
        self, occurrences: _Occurrences, tokens: list[int], most: int
    ) -> tuple[float, list[int]]:
        """Return the score of the best draft, and the draft."""
        found = {(id(each), end): (each, end) for each, end in occurrences.of(tokens)}
        lengths = {key: self._num_equal(*occurrence, tokens) for key, occurrence in found.items()}
        best = 0.0, []
        for length in sorted(set(lengths.values()), reverse=True):
            group = [occurrence for key, occurrence in found.items() if lengths[key] >= length]
            draft = self._follow(group, min(most, int(length * self._factor)))
            best = max(best, draft, key=lambda each: each[0])
        return best

    def _num_equal(self, other: Sequence[int], end: int, tokens: list[int]) -> int:
        """Return how many tokens before `end` in `other` equal the last tokens of `tokens`."""
        most, count = min(end, len(tokens), self._max_depth), 0
        while count < most and other[end - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def _follow(self, group: list[tuple[Sequence[int], int]], most: int) -> tuple[float, list[int]]:
        share, score, draft = 1.0, 0.0, []
        while len(draft) < most:
            following = [(each, at) for each, at in group if at < len(each)]
            if not following:
                break
            counts = Counter(each[at] for each, at in following)
            token, count = counts.most_common(1)[0]
            share *= count / len(group)
            if share < self._min_share:
                break
            score += share
            draft.append(token)
            group = [(each, at + 1) for each, at in following if each[at] == token]
        return score, draft
