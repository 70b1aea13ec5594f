"""SamplingParams of a request: its fields, else the model's defaults, else OpenAI's."""

from qserve.errors import ParameterError
from qserve.params.generation_defaults import DEFAULTED
from qserve.params.sampling_params import MAX_LOGPROBS, SamplingParams
from qserve.server.requests.beam_fields import WITHOUT_EFFECT
from qserve.server.requests.protocol import (
    MAX_ALL_STOP_CHARS,
    MAX_TEMPERATURE,
    ChatCompletionRequest,
    GenerationRequest,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; a chat may fill the context


def sampling_params(
    request: GenerationRequest, defaults: dict[str, float], room: int
) -> SamplingParams:
    """Return the parameters for a prompt that leaves `room` tokens. Raises ParameterError."""
    _check_limits(request)
    max_tokens, logprobs, prompt_logprobs = request.max_tokens, None, request.prompt_logprobs
    if request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
        if max_tokens < 1:
            raise ParameterError("max_completion_tokens", f"expected 1 or more, found {max_tokens}")
    if isinstance(request, ChatCompletionRequest):
        if max_tokens is None:
            max_tokens = room
        if request.logprobs:
            logprobs = request.top_logprobs or 0
            if not 0 <= logprobs <= MAX_LOGPROBS:
                raise ParameterError(
                    "top_logprobs", f"expected 0 to {MAX_LOGPROBS}, found {logprobs}"
                )
    else:
        logprobs = request.logprobs
        if max_tokens is None:
            max_tokens = COMPLETION_MAX_TOKENS
        if request.echo and (logprobs is not None or max_tokens == 0):
            # An echo includes the prompt's; max_tokens: 0 is useful only with them.
            prompt_logprobs = max(prompt_logprobs or 0, logprobs or 0)
    fields = {
        name: getattr(request, name)
        for name in (
            *DEFAULTED,
            "n",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "seed",
            "min_tokens",
            "stop",
            "stop_token_ids",
            "allowed_token_ids",
            "bad_words",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
    }
    fields["logprobs"], fields["prompt_logprobs"] = logprobs, prompt_logprobs
    given = {name: value for name, value in fields.items() if value is not None}
    if request.use_beam_search:
        # Beam search does not sample, so the model's sampling defaults do not apply.
        defaults = {"temperature": 0.0}
        given = {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}
    return SamplingParams(**(defaults | given), max_tokens=min(max_tokens, room))


def _check_limits(request: GenerationRequest) -> None:
    """Raise ParameterError for values that Python programs may give and clients may not."""
    temperature = request.temperature
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise ParameterError("temperature", f"expected 0 to {MAX_TEMPERATURE}, found {temperature}")
    count = sum(map(len, request.stop or ()))
    if count > MAX_ALL_STOP_CHARS:
        raise ParameterError(
            "stop", f"expected at most {MAX_ALL_STOP_CHARS} characters in all, found {count}"
        )
