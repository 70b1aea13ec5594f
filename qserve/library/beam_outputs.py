"""BeamSearchOutput, built from the engine's beams. Names follow vLLM's."""

from collections.abc import Iterable
from dataclasses import dataclass

from qserve.engine.token_event import Hypothesis
from qserve.library.logprobs import SampleLogprobs, to_logprobs
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.sampling_params import SamplingParams
from qserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchSequence:
    """A prompt and one of its best continuations."""

    tokens: list[int]  # prompt tokens, then the beam's tokens
    cum_logprob: float  # sum over the beam's tokens
    score: float  # as BeamSearchParams defines it; beams are sorted by score
    text: str | None  # text of all tokens; None: there is no tokenizer
    finish_reason: str  # "stop" or "length"
    stop_reason: int | None  # the stop token that ended it
    logprobs: SampleLogprobs | None  # one dict for each of the beam's tokens, if requested

    @property
    def cumulative_logprob(self) -> float:
        """`cum_logprob` under CompletionOutput's name."""
        return self.cum_logprob


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOutput:
    """Best beams of one prompt, best score first."""

    sequences: list[BeamSearchSequence]


def beam_search_output(
    beams: Iterable[Hypothesis],
    prompt: list[int],
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchOutput:
    """Convert the engine's beams of one prompt. Without a tokenizer, beams have no text."""
    return BeamSearchOutput(
        sequences=[_sequence(each, prompt, params, tokenizer) for each in beams]
    )


def sampling_params(params: BeamSearchParams) -> SamplingParams:
    """Return the engine's sampling parameters for a beam search. Raises ParameterError."""
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
    logprobs = None
    if params.logprobs is not None:
        logprobs = to_logprobs(beam.token_ids, beam.logprobs, tokenizer)
    return BeamSearchSequence(
        tokens=ids,
        cum_logprob=beam.cumulative_logprob,
        score=beam.score,
        text=None if tokenizer is None else tokenizer.decode(ids),
        finish_reason=beam.finish_reason,
        stop_reason=beam.stop_token,
        logprobs=logprobs,
    )
