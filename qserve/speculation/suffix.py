"""SuffixDrafter: what followed the newest tokens most often, here and in past outputs.

Suffix decoding (Oliaro et al., arXiv 2411.04975). Of every length of the suffix that stands
somewhere, the most frequent next token is followed as long as the product of its shares is at least
suffix_decoding_min_token_prob. The sum of these products is the score of a draft; the best one is
taken. There is no tree: the newest PLACES places of the last token, and as many of the last three,
are compared, which bounds memory and time. Knows token ids alone.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence

from qserve.speculation.config import SpeculativeConfig

PLACES = 32
KEY_LENGTHS = (1, 3)


class _Places:
    """Where the ends of sequences stand in others: each key's newest places."""

    def __init__(self) -> None:
        # last tokens -> (sequence, position of the token behind them)
        self._places: dict[tuple[int, ...], deque[tuple[Sequence[int], int]]] = {}

    def add(self, tokens: Sequence[int], start: int) -> None:
        """Note the places in `tokens` that end at `start` or later, but for its own end."""
        for end in range(max(1, start), len(tokens)):
            for length in KEY_LENGTHS:
                if end >= length:
                    key = tuple(tokens[end - length : end])
                    found = self._places.get(key)
                    if found is None:
                        found = self._places[key] = deque(maxlen=PLACES)
                    found.append((tokens, end))

    def of(self, tokens: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """The places of the last tokens, some twice."""
        for length in KEY_LENGTHS:
            yield from self._places.get(tuple(tokens[-length:]), ())


class SuffixDrafter:
    """A HostDrafter."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._max_depth = config.suffix_decoding_max_tree_depth
        self._max_outputs = config.suffix_decoding_max_cached_requests
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_share = config.suffix_decoding_min_token_prob
        self._live: dict[str, tuple[_Places, list[int]]] = {}
        self._past = _Places()
        self._outputs: OrderedDict[str, list[int]] = OrderedDict()  # the oldest first
        self._num_dropped = 0

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> list[int]:
        """As HostDrafter."""
        if request_id not in self._live:
            self._live[request_id] = _Places(), []
        places, tokens = self._live[request_id]
        known = len(tokens)
        tokens += token_ids[known:]
        places.add(tokens, known)
        own = self._best(places, tokens, most)
        past = self._best(self._past, tokens, most)
        return max(own, past, key=lambda found: found[0])[1]

    def finish(self, request_id: str, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """As HostDrafter: the output is one of the past from now on."""
        self._live.pop(request_id, None)
        output = list(token_ids[num_prompt_tokens:])
        if not self._max_outputs or not output:
            return
        if len(self._outputs) >= self._max_outputs:
            self._outputs.popitem(last=False)
            self._num_dropped += 1
        self._outputs[request_id] = output
        if self._num_dropped > self._max_outputs // 2:
            # places of what was dropped, too: they go when as many again came
            self._past, self._num_dropped = _Places(), 0
            for each in self._outputs.values():
                self._past.add(each, 0)
        else:
            self._past.add(output, 0)

    def _best(self, places: _Places, tokens: list[int], most: int) -> tuple[float, list[int]]:
        """The score of the best draft, and the draft."""
        found = {(id(each), end): (each, end) for each, end in places.of(tokens)}
        lengths = {key: self._num_equal(*place, tokens) for key, place in found.items()}
        best = 0.0, []
        for length in sorted(set(lengths.values()), reverse=True):
            group = [place for key, place in found.items() if lengths[key] >= length]
            draft = self._follow(group, min(most, int(length * self._factor)))
            best = max(best, draft, key=lambda each: each[0])
        return best

    def _num_equal(self, other: Sequence[int], end: int, tokens: list[int]) -> int:
        """How many tokens before `end` are the last ones of `tokens`."""
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
