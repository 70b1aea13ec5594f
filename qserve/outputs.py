"""What a request of the offline API gives: RequestOutput, built of the engine's events.

Names follow vLLM's. Knows no engine.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from formats.errors import InputError
from qserve.engine.request import RequestEvent, TokenLogprobs
from qserve.handling import Handling
from qserve.lora.request import LoRARequest
from qserve.sampling_params import SamplingParams
from qserve.text import TextStream, Tokenizer

# A text, token ids, or a dict of vLLM's with one of these keys, and maybe a cache_salt.
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids")
CACHE_SALT = "cache_salt"  # such prompts share KV pages with those of the same salt alone


class EngineDeadError(RuntimeError):
    """The engine has failed and takes no more requests."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt. It grows with the engine's steps."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length" or "error"
    stop_reason: int | str | None = None  # the stop token or stop string that ended it
    logprobs: list[TokenLogprobs] | None = None  # of each of token_ids, where asked for
    is_asked_for: bool = False  # an error that lies in what was asked, not in the model

    @property
    def cumulative_logprob(self) -> float | None:
        """The log probability of all tokens, where log probabilities were asked for."""
        return None if self.logprobs is None else sum(each.logprob for each in self.logprobs)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """When things happened to a request, by time.perf_counter(); None: not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its `n` continuations."""

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    # where asked for: of each token of the prompt, None for its first
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0  # of the prompt: their KV pages were there
    metrics: RequestTimes | None = None


class OutputBuilder:
    """The RequestOutput of one request while its choices run."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        """Without a tokenizer texts stay empty. Raises InputError where a parameter needs one."""
        if params.stop and tokenizer is None:
            raise InputError("stop", "needs text", "leave detokenize on")
        self.params = [params.choice(index) for index in range(params.n)]
        self.output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            outputs=[CompletionOutput(index=index) for index in range(params.n)],
            metrics=RequestTimes(arrival_time=time.perf_counter()),
        )
        self._streams = [
            tokenizer and TextStream(tokenizer, each, prompt_token_ids) for each in self.params
        ]

    def engine_id(self, index: int) -> str:
        """What the engine calls a choice."""
        return f"{self.output.request_id}-{index}"

    def take(self, index: int, event: RequestEvent) -> bool:
        """Add an event of a choice. Returns True where a stop string ended what still runs."""
        completion, stream = self.output.outputs[index], self._streams[index]
        if completion.finish_reason is not None:
            return False
        if self.output.metrics.first_token_time is None:
            now = time.perf_counter()
            self.output.metrics = replace(self.output.metrics, first_token_time=now)
        if event.prompt_logprobs is not None:
            self.output.prompt_logprobs = list(event.prompt_logprobs)
        if index == 0:
            self.output.num_cached_tokens = event.num_cached
        delta = None if stream is None or event.finish_reason == "error" else stream.push(event)
        # of an event of several tokens none behind a stop string
        count = len(event.token_ids if delta is None else delta.token_ids)
        completion.token_ids += event.token_ids[:count]
        if event.logprobs:
            completion.logprobs = [*(completion.logprobs or ()), *event.logprobs[:count]]
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
        """The output as it is now; it does not change with later steps."""
        outputs = [
            replace(
                each,
                token_ids=list(each.token_ids),
                logprobs=None if each.logprobs is None else list(each.logprobs),
            )
            for each in self.output.outputs
        ]
        return replace(self.output, outputs=outputs)


def read_prompt(prompt: Prompt, tokenizer_of: Any) -> tuple[str | None, list[int]]:
    """A prompt's text, if it is one, and its tokens. `tokenizer_of()` gives the tokenizer."""
    if isinstance(prompt, Mapping):
        given = [key for key in PROMPT_KEYS if prompt.get(key) is not None]
        unknown = prompt.keys() - {*PROMPT_KEYS, CACHE_SALT}
        if unknown or not given:
            found = ", ".join(sorted(map(str, prompt)))
            raise InputError("prompt", f"expected a dict with prompt or prompt_token_ids: {found}")
        text = prompt.get("prompt")
        if "prompt_token_ids" in given:
            return text, list(prompt["prompt_token_ids"])
        prompt = text
    if isinstance(prompt, str):
        return prompt, tokenizer_of().encode(prompt)
    return None, list(prompt)


def handling_of(prompt: Prompt, priority: int, lora: LoRARequest | None = None) -> Handling:
    """What a prompt asks of the engine beside its sampling. Raises InputError."""
    salt = prompt.get(CACHE_SALT) if isinstance(prompt, Mapping) else None
    return Handling(priority=priority, cache_salt=salt or "", lora=lora)


def as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts
