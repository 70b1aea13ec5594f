"""RequestOutput and CompletionOutput, built from the engine's events. Names follow vLLM's."""

import time
from dataclasses import dataclass, field, replace

from qserve.engine.token_event import TokenEvent
from qserve.library.logprobs import PromptLogprobs, SampleLogprobs, to_logprobs, to_prompt_logprobs
from qserve.params.sampling_params import SamplingParams
from qserve.text.text_stream import TextStream
from qserve.text.tokenizer import Tokenizer


class EngineDeadError(RuntimeError):
    """The engine has failed and takes no more requests."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt. Each engine step extends it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    logprobs: SampleLogprobs | None = None  # one dict for each of token_ids, if requested
    is_asked_for: bool = False  # True: the request caused the error, not the engine

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' log probabilities; None unless `logprobs` was requested."""
        if self.logprobs is None:
            return None
        return sum(
            each[token].logprob for token, each in zip(self.token_ids, self.logprobs, strict=True)
        )

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """Times of a request's events, by time.perf_counter(); None: not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its `n` continuations."""

    request_id: str
    prompt: str | None  # None if the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None = None  # one entry per prompt token, if requested
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_preemptions: int = 0  # preemptions of the first output
    metrics: RequestTimes | None = None


class OutputBuilder:
    """Builds the RequestOutput of one request from the events of its choices."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Start with an empty output. Without a tokenizer, texts stay empty."""
        self.params = [params.choice(index) for index in range(params.n)]
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index=index) for index in range(params.n)],
            metrics=RequestTimes(arrival_time=time.perf_counter()),
        )
        self._tokenizer = tokenizer
        self._streams = [
            tokenizer and TextStream(tokenizer, each, prompt_token_ids) for each in self.params
        ]

    def engine_id(self, index: int) -> str:
        """Return the engine's id of a choice."""
        return f"{self.output.request_id}-{index}"

    def take(self, index: int, event: TokenEvent) -> bool:
        """Add an event of a choice. Returns True if a stop string ended the choice.

        The caller must then abort the choice in the engine.
        """
        completion, stream = self.output.outputs[index], self._streams[index]
        if completion.finish_reason is not None:
            return False
        if self.output.metrics.first_token_time is None:
            now = time.perf_counter()
            self.output.metrics = replace(self.output.metrics, first_token_time=now)
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = to_prompt_logprobs(
                self.output.prompt_token_ids, event.prompt_logprobs, self._tokenizer
            )
        if index == 0:
            self.output.num_cached_tokens = event.facts.num_cached
            self.output.num_preemptions = event.facts.num_preemptions
        delta = None if stream is None or event.finish_reason == "error" else stream.push(event)
        # An event may have several tokens; the tokens after a stop string are dropped.
        count = len(event.token_ids if delta is None else delta.event.token_ids)
        token_ids = event.token_ids[:count]
        completion.token_ids += token_ids
        if event.logprobs:
            found = to_logprobs(token_ids, event.logprobs[:count], self._tokenizer)
            completion.logprobs = [] if completion.logprobs is None else completion.logprobs
            completion.logprobs += found
        if event.finish_reason == "error":
            completion.finish_reason, completion.stop_reason = "error", event.error
            completion.is_asked_for = event.is_asked_for
        elif delta is None:
            completion.finish_reason, completion.stop_reason = event.finish_reason, event.stop_token
        else:
            completion.text += delta.text
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
        if completion.finish_reason is not None and all(
            each.finish_reason is not None for each in self.output.outputs
        ):
            self.output.finished = True
            now = time.perf_counter()
            self.output.metrics = replace(self.output.metrics, finished_time=now)
        return completion.finish_reason is not None and event.finish_reason is None

    def snapshot(self) -> RequestOutput:
        """Return a copy of the output that later steps do not change."""
        outputs = [
            replace(
                each,
                token_ids=list(each.token_ids),
                logprobs=None if each.logprobs is None else list(each.logprobs),
            )
            for each in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)
