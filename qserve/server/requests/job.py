"""Job: the prompts, parameters and options of a request, made from its body.

Making a job takes time (parsing, chat template, tokenizing), so routes leave it to Preparation.
"""

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qserve.engine.token_event import RequestFacts
from qserve.multimodal.media import MediaItem
from qserve.output_parsing.output_parser import ParseSettings
from qserve.params.request_options import DEFAULT, RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.server.http.errors import ApiError
from qserve.server.requests.served_model import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Facts about a request that are not in its body."""

    time: float  # time.perf_counter() when the body had been read
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_named: bool = False  # True: `name` is from a header, which takes precedence over the body
    timeout: float | None = None  # seconds after `time` until the deadline; None: no deadline
    trace_headers: dict[str, str] = field(default_factory=dict)  # headers with the trace context
    key_digest: str = ""  # digest of the API key, with --cache-salt-by-key; else ""

    def named(self, from_body: str | None) -> str:
        """Return the request's name: the header's, else the body's, else a new one."""
        return self.name if self.is_named or from_body is None else from_body

    def salted(self, options: RequestOptions) -> RequestOptions:
        """Return `options` with a cache salt for the API key, with --cache-salt-by-key."""
        if not self.key_digest:
            return options
        digest = hashlib.sha256(f"{self.key_digest}{options.cache_salt}".encode())
        return replace(options, cache_salt=digest.hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts, parameters and options of a request. Choices are numbered prompt by prompt."""

    prefix: str  # start of the reply's id
    name: str  # request's name: from the client, or a new one
    key: str  # start of the ids of the engine's requests; unique per job
    arrival: Arrival
    prompts: list[list[int]]
    params: list[SamplingParams] = field(default_factory=list)
    # texts of the prompts, if the reply echoes them
    echoed: list[str] = field(default_factory=list)
    streams: bool = False
    streams_usage: bool = False  # the stream ends with a usage chunk
    streams_usage_always: bool = False  # each chunk has the usage so far
    prompt_logprobs: int | None = None  # alternatives per prompt token in the reply
    returns_token_ids: bool = False
    parsing: ParseSettings | None = None  # None: all text is content
    tokens_as_ids: bool = False  # log probabilities name tokens by id
    ignored: tuple[str, ...] = ()  # fields of the body without effect
    warnings: tuple[str, ...] = ()  # for the header x-warnings
    repeated: dict[str, Any] = field(
        default_factory=dict
    )  # fields of the body that the reply repeats or depends on
    options: RequestOptions = DEFAULT
    # media items of each prompt; empty: `options` has those of all prompts
    media: list[tuple[MediaItem, ...]] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        """Id of the reply."""
        return f"{self.prefix}{self.name}"

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params[0].n

    @property
    def num_outputs(self) -> int:
        """Number of outputs that the engine computes, including all beams of a beam search."""
        search = self.options.beam_search
        width = self.params[0].n if search is None else search.beam_width
        return len(self.prompts) * width

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_engine_tokens(self) -> int:
        """Number of prompt tokens that the engine gets: each prompt counts once per output."""
        if self.options.beam_search is not None:
            return self.num_prompt_tokens
        return self.num_prompt_tokens * self.params[0].n

    def num_cached(self, of_choices: Mapping[int, RequestFacts]) -> int:
        """Return the number of cached prompt tokens, counted for the first choice of each prompt.

        The other choices do not count: they also find the pages that the first one computed.
        """
        firsts = range(0, self.num_choices, self.params[0].n)
        return sum(of_choices[index].num_cached for index in firsts if index in of_choices)

    def choice(self, index: int) -> tuple[list[int], SamplingParams]:
        """Return prompt and parameters of a choice. A prompt's first choice has prompt_logprobs."""
        prompt, repeat = divmod(index, self.params[0].n)
        params = self.params[prompt]
        return self.prompts[prompt], params.choice(repeat)

    def request_options_of(self, index: int) -> RequestOptions:
        """Return how the engine handles a choice."""
        if not self.media:
            return self.options
        return replace(self.options, media=self.media[index // self.params[0].n])

    def prompt_of(self, index: int) -> list[int]:
        """Return the prompt of a choice. Cheaper than `choice`, which makes parameters."""
        return self.prompts[index // self.params[0].n]

    def echo(self, index: int) -> str:
        """Return the prompt text that the reply repeats before a choice; "" without echo."""
        return self.echoed[index // self.params[0].n] if self.echoed else ""


def new_key(prefix: str) -> str:
    """Return a new `Job.key`."""
    return f"{prefix}{uuid.uuid4().hex}"


def check_truncation(longest: int, kept: int | None) -> None:
    """Raise ApiError(400) for an invalid truncate_prompt_tokens. `longest`: that of a prompt."""
    if kept is not None and not (kept == -1 or 1 <= kept <= longest):
        raise ApiError(
            400,
            f"truncate_prompt_tokens: expected 1 to {longest}, or -1 for as many as fit, found"
            f" {kept}.",
            "Give such a number, or leave truncate_prompt_tokens out.",
            "truncate_prompt_tokens",
        )


def check_vocabulary(model: ServedModel, token_ids: list[int] | tuple[int, ...], name: str) -> None:
    size = model.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(token for token in token_ids if not 0 <= token < size)
        raise ApiError(
            400,
            f"{name}: expected token ids of 0 to {size - 1}, found {wrong}.",
            "Use ids of this model's vocabulary.",
            name,
        )
