"""Common code of completion and chat jobs: parameters, prompt lengths, choices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qserve.multimodal.media import MediaItem
from qserve.output_parsing.output_parser import ParseSettings
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.server.http.errors import ApiError
from qserve.server.requests.generation_params import beam_search, ignored_in_search, sampling_params
from qserve.server.requests.job import Arrival, Job, check_truncation, check_vocabulary, new_key
from qserve.server.requests.protocol import (
    GenerationRequest,
)
from qserve.server.requests.served_model import ServedModel
from qserve.structured.params import StructuredOutputsParams
from qserve.text.tokenizer import with_bad_words

MAX_CHOICES = 1024  # maximum number of outputs of one request, over all its prompts


class PromptTooLong(ApiError):
    """The prompt fills the model's context and leaves no room for output."""

    def __init__(self, limit: int, length: int, *, is_at_least: bool = False) -> None:
        """`length`: number of prompt tokens. `is_at_least`: the prompt may be longer than that."""
        found = f"at least {length}" if is_at_least else f"{length}"
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{found} input tokens, and an answer needs at least one.",
            "Shorten the prompt.",
            "input_tokens",
        )
        self.limit, self.length = limit, length


def checked_params(
    model: ServedModel, request: GenerationRequest, num_prompts: int
) -> SamplingParams:
    """Return the parameters for an empty context, before prompts are encoded. Raises ApiError."""
    model.check_name(request.model)
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(request, name)
        if asked is not None and asked > model.max_model_len:
            raise ApiError(
                400,
                f"{name}: expected at most the {model.max_model_len} tokens of this model's"
                f" context, found {asked}.",
                f"Lower {name}.",
                name,
            )
    check_truncation(model.max_model_len - 1, request.truncate_prompt_tokens)
    params = sampling_params(request, model.defaults, model.max_model_len)
    search = beam_search(request)
    num_each = params.n if search is None else search.beam_width
    if num_prompts * num_each > MAX_CHOICES:
        raise ApiError(
            400,
            f"n: expected at most {MAX_CHOICES} choices, found {num_prompts} times {num_each}.",
            "Ask for fewer choices.",
            "n",
        )
    check_vocabulary(model, params.stop_token_ids, "stop_token_ids")
    check_vocabulary(model, params.allowed_token_ids or (), "allowed_token_ids")
    check_vocabulary(model, [token for token, _ in params.logit_bias], "logit_bias")
    return params


def encode(
    model: ServedModel, text: str, add_special_tokens: bool, request: GenerationRequest
) -> list[int]:
    """Tokenize a text. Raises ApiError without tokenizing if the text is certainly too long."""
    check_length(model, text, request)
    return model.tokenizer.encode(text, add_special_tokens)


def fitted(
    model: ServedModel, request: GenerationRequest, prompts: list[list[int]]
) -> list[list[int]]:
    """Apply truncate_prompt_tokens to the prompts.

    Raises ApiError for a prompt that is empty, or that leaves no room for output.
    """
    prompts = [_truncate(model, request, prompt) for prompt in prompts]
    for prompt in prompts:
        if len(prompt) >= model.max_model_len:
            raise PromptTooLong(model.max_model_len, len(prompt))
        if not prompt:
            raise ApiError(400, "prompt: expected at least one token.", "Write a prompt.", "prompt")
        check_vocabulary(model, prompt, "prompt")
    return prompts


def generation_job(
    model: ServedModel,
    request: GenerationRequest,
    arrival: Arrival,
    *,
    prefix: str,
    prompts: list[list[int]],
    params: SamplingParams,
    form: StructuredOutputsParams | None,
    ignored: Sequence[str],
    warnings: Sequence[str],
    echoed: Sequence[str] = (),
    parsing: ParseSettings | None = None,
    repeated: dict[str, Any] | None = None,
    media: tuple[MediaItem, ...] = (),
) -> Job:
    """Return the job of prompts from `fitted`. Raises ApiError and InputError.

    prefix: start of the request id
    params: parameters for an empty context; max_tokens is reduced for each prompt
    form: grammar of the output
    echoed: texts of the prompts, if the reply repeats them
    media: media items; then there is only one prompt
    """
    search = beam_search(request, form)
    if form is not None:
        params = replace(params, structured_outputs=form)
    params = with_bad_words(params, lambda: model.tokenizer)
    params_of_room = {params.max_tokens: params}
    params_of_prompts = []
    for prompt in prompts:
        most = min(params.max_tokens, model.max_model_len - len(prompt))
        if most not in params_of_room:
            params_of_room[most] = replace(params, max_tokens=most)
        params_of_prompts.append(params_of_room[most])
    options = RequestOptions(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        beam_search=search,
        lora=model.adapter(request.model),
        media=media,
    )
    return Job(
        prefix=prefix,
        name=arrival.named(request.request_id),
        key=new_key(prefix),
        arrival=arrival,
        prompts=prompts,
        params=params_of_prompts,
        echoed=list(echoed),
        streams=bool(request.stream),
        streams_usage=request.wants_usage,
        streams_usage_always=request.wants_usage_always,
        prompt_logprobs=request.prompt_logprobs,
        returns_token_ids=bool(request.return_token_ids),
        parsing=parsing,
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        ignored=(*ignored, *ignored_in_search(request)),
        warnings=tuple(warnings),
        repeated=repeated or {},
        options=arrival.salted(options),
    )


def _truncate(model: ServedModel, request: GenerationRequest, prompt: list[int]) -> list[int]:
    """Apply truncate_prompt_tokens: keep the end, or the start with truncation_side: right."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == -1:
        asked = request.max_completion_tokens or request.max_tokens or 1
        kept = max(1, model.max_model_len - asked)
    return prompt[:kept] if request.truncation_side == "right" else prompt[-kept:]


def check_length(model: ServedModel, text: str, request: GenerationRequest) -> None:
    """Raise PromptTooLong for a text that is certainly too long, without tokenizing it."""
    if request.truncate_prompt_tokens is not None:
        return
    at_least = len(text) // model.tokenizer.max_token_chars
    if at_least >= model.max_model_len:
        raise PromptTooLong(model.max_model_len, at_least, is_at_least=True)
