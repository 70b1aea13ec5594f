"""SamplingParams: how to pick tokens and when to stop. Loads no torch; field names are vLLM's.

The limits in this file protect the engine's memory and follow from the sizes of its kernels. The
server has more limits (qserve/server/requests/generation_job.py and protocol.py).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from qserve.errors import LEAVE_OUT, ParameterError
from qserve.params.known_fields import names_unknown_fields
from qserve.params.parameter_types import (
    Check,
    biases,
    flag,
    integer,
    integers,
    listed,
    number,
    texts,
)
from qserve.structured.params import StructuredOutputsParams, as_structured_outputs

# Limits of one request: number of stop strings, characters of one, characters of all.
MAX_STOP_STRINGS, MAX_STOP_CHARS, MAX_ALL_STOP_CHARS = 2**12, 2**16, 2**18
MAX_STOP_TOKEN_IDS = 1024
MAX_N = 128
MAX_LOGPROBS = 20  # alternatives that the sampling kernel returns (qkernels/sampling/settings.py)
MAX_LOGIT_BIAS = 1024  # entries
MAX_ALLOWED_TOKEN_IDS = 2**14
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 256  # characters of one word
# The sampler's integers have 64 bits, and its factors must keep float32 logits finite.
MAX_INTEGER = 2**63 - 1
SEEDS = 2**64
NO_SEED = -1  # the same as None, as in vLLM
MAX_TEMPERATURE = 1e6
MAX_REPETITION_PENALTY = 100.0


@names_unknown_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to pick tokens and when to stop. temperature 0 is greedy. Raises ParameterError.

    A field given as None gets its default, as null does in a request's body; only max_tokens=None
    has a meaning, no limit. Sequences are stored as tuples, `logit_bias` as a tuple of pairs.

    The sampler adds biases to the logits, then applies penalties, then divides by the temperature.
    Filters apply to the resulting probabilities, in the order min_p, top_k, top_p. Reported log
    probabilities are the model's own, before these changes. With a `seed` the random numbers depend
    only on the seed and the token's position, not on the batch; output i of `n` uses seed + i.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0  # keep the likeliest tokens until their probabilities sum to this
    top_k: int = 0  # keep the k likeliest; 0 or -1: all
    min_p: float = 0.0  # drop tokens less likely than this fraction of the likeliest
    presence_penalty: float = 0.0  # subtracted from the logits of tokens in the output
    frequency_penalty: float = 0.0  # subtracted once for each time a token is in the output
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits; prompt too
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = ()  # added to logits
    logprobs: int | None = None  # report the token's log probability and this many alternatives
    prompt_logprobs: int | None = None  # as logprobs, for each prompt token except the first
    seed: int | None = None  # None or -1: a random seed
    max_tokens: int | None = 16  # None: up to the model's limit; 0: prompt_logprobs alone
    min_tokens: int = 0  # stop and end tokens are forbidden before this many tokens
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True  # False (Python API only): outputs have no text, no tokenizer is needed
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None  # format of the text; or a dict
    # None: all tokens. List an end token, too, if the output may end with one.
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()  # texts that the output must not contain
    # `bad_words` as token sequences, which the engine never completes. The tokenizer sets them.
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for name, default, check in _FIELDS:
            value = getattr(self, name)
            if value is default:
                continue
            if value is None and name != "max_tokens":
                value = default
            if value is not None and check is not None:
                value = check(name, value)
            object.__setattr__(self, name, value)
        sequences = tuple(map(tuple, self.bad_words_token_ids or ()))
        object.__setattr__(self, "bad_words_token_ids", sequences)
        if self.seed == NO_SEED:
            object.__setattr__(self, "seed", None)
        form = as_structured_outputs(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", form)
        self._require("n", 1 <= self.n <= MAX_N, f"1 to {MAX_N}")
        self._require(
            "temperature", 0 <= self.temperature <= MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}"
        )
        self._require(
            "top_p", math.isfinite(self.top_p) and 0 < self.top_p <= 1, "more than 0, up to 1"
        )
        self._require("top_k", -1 <= self.top_k <= MAX_INTEGER, f"-1 to {MAX_INTEGER}")
        self._require("min_p", math.isfinite(self.min_p) and 0 <= self.min_p <= 1, "0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2 <= getattr(self, name) <= 2, "-2 to 2")
        self._require(
            "repetition_penalty",
            1 / MAX_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"{1 / MAX_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY:g}",
        )
        self._require(
            "logit_bias",
            all(token >= 0 and -100 <= value <= 100 for token, value in self.logit_bias),
            "ids of 0 or more, and values of -100 to 100",
        )
        self._require(
            "logprobs",
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"0 to {MAX_LOGPROBS}",
        )
        self._require(
            "seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"
        )
        self._require(
            "prompt_logprobs",
            self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
            f"0 to {MAX_LOGPROBS}",
        )
        least = 1 if self.prompt_logprobs is None else 0
        self._require(
            "max_tokens", self.max_tokens is None or self.max_tokens >= least, f"{least} or more"
        )
        limit = math.inf if self.max_tokens is None else self.max_tokens
        self._require("min_tokens", 0 <= self.min_tokens <= limit, "0 to max_tokens")
        self._require("stop", all(self.stop), "no empty string")
        if self.stop and not self.detokenize:
            raise ParameterError("stop", "is searched in the text", "leave detokenize on")
        self._require(
            "stop_token_ids", all(t >= 0 for t in self.stop_token_ids), "ids of 0 or more"
        )
        self._check_filter()

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def has_filter(self) -> bool:
        """True if tokens are forbidden other than by `structured_outputs`."""
        return self.allowed_token_ids is not None or bool(self.bad_words_token_ids)

    def choice(self, index: int) -> "SamplingParams":
        """Return the parameters of output `index` of `n`. Output 0 reports the prompt_logprobs."""
        prompt_logprobs = None if index and self.max_tokens != 0 else self.prompt_logprobs
        seed = self.seed
        if seed is not None:
            # The largest 64-bit seed is followed by the smallest, which also replaces NO_SEED.
            seed = (seed + index + SEEDS // 2) % SEEDS - SEEDS // 2
            seed = -(SEEDS // 2) if seed == NO_SEED else seed
        if (self.n, self.seed, self.prompt_logprobs) == (1, seed, prompt_logprobs):
            return self
        return replace(self, n=1, seed=seed, prompt_logprobs=prompt_logprobs)

    def _check_filter(self) -> None:
        if self.allowed_token_ids is not None:
            self._require("allowed_token_ids", len(self.allowed_token_ids) > 0, "one id or more")
            self._require("allowed_token_ids", min(self.allowed_token_ids) >= 0, "ids of 0 or more")
        self._require("bad_words", all(map(str.strip, self.bad_words)), "no empty word")
        if self.bad_words_token_ids:
            self._require_at_most("bad_words_token_ids", 2 * MAX_BAD_WORDS, "sequences")
            self._require("bad_words_token_ids", all(self.bad_words_token_ids), "no empty sequence")
            least = min(map(min, self.bad_words_token_ids))
            self._require("bad_words_token_ids", least >= 0, "ids of 0 or more")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ParameterError(
                name, f"expected {expected}, found {listed(getattr(self, name))}", LEAVE_OUT
            )

    def _require_at_most(self, name: str, limit: int, what: str) -> None:
        count = len(getattr(self, name))
        if count > limit:
            raise ParameterError(
                name, f"expected at most {limit} {what}, found {count}", "give fewer"
            )


# Field -> type check, which also converts the value.
TYPES: dict[str, Check] = {
    **dict.fromkeys(
        ("n", "top_k", "logprobs", "prompt_logprobs", "seed", "max_tokens", "min_tokens"), integer
    ),
    **dict.fromkeys(
        (
            *("temperature", "top_p", "min_p"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
        ),
        number,
    ),
    **dict.fromkeys(
        ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens"), flag
    ),
    "logit_bias": biases(MAX_LOGIT_BIAS),
    "stop": texts(MAX_STOP_STRINGS, "strings", MAX_STOP_CHARS, MAX_ALL_STOP_CHARS),
    "stop_token_ids": integers(MAX_STOP_TOKEN_IDS),
    "allowed_token_ids": integers(MAX_ALLOWED_TOKEN_IDS),
    "bad_words": texts(MAX_BAD_WORDS, "words", MAX_BAD_WORD_CHARS),
}
# (name, default, check) of each field
_FIELDS = tuple(
    (field.name, field.default, TYPES.get(field.name)) for field in fields(SamplingParams)
)
