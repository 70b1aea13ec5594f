"""What a beam search gives: BeamSearchOutput, built of the engine's beams. Names follow vLLM's.

Knows no engine.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from qserve.beam_search_params import BeamSearchParams
from qserve.engine.request import Hypothesis, TokenLogprobs
from qserve.sampling_params import SamplingParams
from qserve.text import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """A prompt and one of its best continuations."""

    tokens: list[int]  # the prompt's, then the beam's
    cum_logprob: float  # of the beam's tokens
    score: float  # what beams are compared by
    text: str | None  # of all tokens; None without a tokenizer
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None  # the stop token that ended it
    logprobs: list[TokenLogprobs] | None  # of the beam's tokens, where asked for

    @property
    def cumulative_logprob(self) -> float:
        """The name that CompletionOutput has for it."""
        return self.cum_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """The best beams of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    beams: Iterable[Hypothesis],
    prompt: list[int],
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchOutput:
    """The engine's beams as the caller gets them; without a tokenizer they have no text."""
    return BeamSearchOutput(
        sequences=[_sequence(each, prompt, params, tokenizer) for each in beams]
    )


def sampling_params(params: BeamSearchParams) -> SamplingParams:
    """What the engine reads beside the search. Raises ParameterError."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids,
        logprobs=params.logprobs,
    )


def _sequence(
    beam: Hypothesis, prompt: list[int], params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    is_hidden = beam.ended_by_token and not params.include_stop_str_in_output
    ids = prompt + list(beam.token_ids[:-1] if is_hidden else beam.token_ids)
    return BeamSearchSequence(
        tokens=ids,
        cum_logprob=beam.cumulative_logprob,
        score=beam.score,
        text=None if tokenizer is None else tokenizer.decode(ids),
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_token,
        logprobs=None if params.logprobs is None else list(beam.logprobs),
    )
