"""Beam search of the offline API: prompts in, their best beams out. Names follow vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass

from tqdm import tqdm

from formats.errors import InputError
from qserve.beam_search_params import BeamSearchParams
from qserve.engine.request import Hypothesis, TokenLogprobs
from qserve.handling import Handling
from qserve.llm_engine import LLMEngine
from qserve.outputs import Prompt, handling_of, read_prompt
from qserve.sampling_params import SamplingParams


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


def run(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    names: Sequence[str],
    use_tqdm: bool,
    detokenize: bool,
) -> list[BeamSearchOutput]:
    """Search for all prompts at once; outputs in their order. Raises InputError."""
    engine.check_health()
    if engine.has_unfinished_requests():
        raise InputError(
            "LLM", "other requests are running on its engine", "step until they are done"
        )
    core, tokens, done = engine.engine, {}, {}
    tokenizer = engine.get_tokenizer() if detokenize else None
    sampling = sampling_params(params)
    try:
        for name, prompt in zip(names, prompts, strict=True):
            _, ids = read_prompt(prompt, engine.get_tokenizer)
            handling = Handling(cache_salt=handling_of(prompt, 0).cache_salt, beam_search=params)
            core.add_request(name, ids, sampling, handling=handling)
            tokens[name] = ids
        with tqdm(total=len(names), desc="Beam search", unit="prompt", disable=not use_tqdm) as bar:
            while core.has_work():
                for event in core.step():
                    if event.finish_reason == "error":
                        raise InputError(f"request {event.request_id}", event.error)
                    done[event.request_id] = event.beams
                    bar.update()
    except BaseException:
        for name in tokens:
            core.abort(name)
        raise
    return [
        BeamSearchOutput(
            sequences=[_sequence(each, tokens[name], params, tokenizer) for each in done[name]]
        )
        for name in names
    ]


def _sequence(
    beam: Hypothesis, prompt: list[int], params: BeamSearchParams, tokenizer: object
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
