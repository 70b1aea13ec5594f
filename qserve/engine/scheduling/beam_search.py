"""BeamSearch: decides which beams continue and which have ended.

The rules are those of transformers' `_beam_search`. For each beam the search needs the `beam_width
+ number of end tokens` most likely tokens, which include all tokens that may continue a beam.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import NamedTuple

from qserve.engine.token_event import Hypothesis, TokenLogprobs
from qserve.params.beam_search_params import NEVER, BeamSearchParams


class Step(NamedTuple):
    """The last token of a beam. Beams share their earlier tokens as a linked list."""

    before: "Step | None"
    token: int
    logprobs: TokenLogprobs


class Choice(NamedTuple):
    """A beam that continues."""

    parent: int  # index of the beam that it continues
    score: float  # sum of the log probabilities of its tokens
    last: Step


@dataclass(slots=True, kw_only=True)
class BeamSearch:
    """The beam search of one prompt."""

    params: BeamSearchParams
    max_tokens: int
    end_tokens: frozenset[int]  # end tokens of the model
    num_tokens: int = 0  # in each running beam
    running: list[Choice] = field(default_factory=list)  # in the order that the caller has set
    ended: list[Hypothesis] = field(default_factory=list)  # best first

    @property
    def num_candidates(self) -> int:
        """Number of top tokens that each beam must report."""
        return self.params.beam_width + len(self.all_ends)

    @property
    def all_ends(self) -> frozenset[int]:
        return self.end_tokens.union(self.params.stop_token_ids)

    def advance(self, logprobs: Sequence[TokenLogprobs]) -> list[Choice]:
        """Advance all beams by one token.

        `logprobs`: the most likely tokens of each running beam, in the order of `running`. Returns
        the beams that continue, best first; an empty list if the search is over.
        """
        self.num_tokens += 1
        width, ends = self.params.beam_width, self.all_ends
        is_last = self.num_tokens >= self.max_tokens
        may_end = self.num_tokens > self.params.min_tokens
        chosen: list[Choice] = []
        best = [each for each in self._candidates(logprobs) if may_end or each[2] not in ends]
        for rank, (score, parent, token, logprob) in enumerate(best):
            is_end = token in ends
            continues = not (is_end or is_last)
            if not continues and rank >= width or continues and len(chosen) == width:
                continue
            entry = TokenLogprobs(
                logprob, logprobs[parent].top_tokens, logprobs[parent].top_logprobs
            )
            last = Step(self.running[parent].last if self.running else None, token, entry)
            choice = Choice(parent, score, last)
            if continues:
                chosen.append(choice)
            else:
                self.ended.append(self._hypothesis(choice, is_end))
        self.ended.sort(key=attrgetter("score"), reverse=True)
        del self.ended[width:]
        return [] if is_last or self._is_over(chosen) else chosen

    def best(self) -> tuple[Hypothesis, ...]:
        """The ended beams to return."""
        return tuple(self.ended[: self.params.num_returned])

    def _candidates(self, logprobs: Sequence[TokenLogprobs]) -> list[tuple[float, int, int, float]]:
        """Return (score, beam, token, log probability) of all candidates, best first."""
        scores = [each.score for each in self.running] or [0.0]
        found = [
            (score + logprob, index, token, logprob)
            for index, (score, each) in enumerate(zip(scores, logprobs, strict=True))
            for token, logprob in zip(each.top_tokens, each.top_logprobs, strict=True)
        ]
        return sorted(found, key=itemgetter(0), reverse=True)

    def _is_over(self, chosen: Sequence[Choice]) -> bool:
        if not chosen:
            return True
        if len(self.ended) < self.params.beam_width:
            return False
        if self.params.early_stopping is True:
            return True
        can_grow = self.params.early_stopping == NEVER and self.params.length_penalty > 0
        length = self.max_tokens if can_grow else self.num_tokens
        return self._score(chosen[0].score, length) <= self.ended[-1].score

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / num_tokens**self.params.length_penalty

    def _hypothesis(self, choice: Choice, is_end: bool) -> Hypothesis:
        tokens, entries = [], []
        step: Step | None = choice.last
        while step is not None:
            tokens.append(step.token)
            entries.append(step.logprobs)
            step = step.before
        count, last = self.params.logprobs, choice.last.token
        logprobs = () if count is None else tuple(each.cut(count) for each in reversed(entries))
        return Hypothesis(
            token_ids=tuple(reversed(tokens)),
            score=self._score(choice.score, self.num_tokens),
            cumulative_logprob=choice.score,
            finish_reason="stop" if is_end else "length",
            stop_token=last if last in self.params.stop_token_ids else None,
            ended_by_token=is_end,
            logprobs=logprobs,
        )
