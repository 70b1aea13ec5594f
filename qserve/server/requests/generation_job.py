"""The part of a job that completions and chats share: parameters, lengths, choices."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qserve.multimodal.media import MediaItem
from qserve.output_parsing.output_parser import ParseSettings
from qserve.params.handling import Handling
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

MAX_CHOICES = 1024  # outputs of one request, over all its prompts


class PromptTooLong(ApiError):
    """A prompt that leaves no room for an answer in the model's context."""

    def __init__(self, limit: int, length: int, *, is_at_least: bool = False) -> None:
        """`length`: tokens of the prompt, or `is_at_least` a lower bound of their number."""
        found = f"at least {length}" if is_at_least else f"{length}"
        super().__init__(
            400,
            f"This model's maximum context length is {limit} tokens. However, your prompt contains "
            f"{found} input tokens, and an answer needs at least one. Shorten the prompt.",
            "input_tokens",
        )
        self.limit, self.length = limit, length


def checked_params(
    model: ServedModel, request: GenerationRequest, num_prompts: int
) -> SamplingParams:
    """Parameters before any prompt is encoded, for an empty context. Raises ApiError."""
    model.check_name(request.model)
    for name in ("max_tokens", "max_completion_tokens"):
        asked = getattr(request, name)
        if asked is not None and asked > model.max_model_len:
            raise ApiError(
                400,
                f"{name}: expected at most the {model.max_model_len} tokens of this model's"
                f" context, found {asked}.",
                name,
            )
    check_truncation(model, request.truncate_prompt_tokens)
    params = sampling_params(request, model.defaults, model.max_model_len)
    search = beam_search(request)
    num_each = params.n if search is None else search.beam_width
    if num_prompts * num_each > MAX_CHOICES:
        raise ApiError(
            400,
            f"n: expected at most {MAX_CHOICES} choices, found {num_prompts} times {num_each}.",
            "n",
        )
    check_vocabulary(model, params.stop_token_ids, "stop_token_ids")
    check_vocabulary(model, params.allowed_token_ids or (), "allowed_token_ids")
    check_vocabulary(model, [token for token, _ in params.logit_bias], "logit_bias")
    return params


def encode(
    model: ServedModel, text: str, add_special_tokens: bool, request: GenerationRequest
) -> list[int]:
    """The tokens of a text. Raises ApiError if its length alone says that it cannot fit."""
    check_length(model, text, request)
    return model.tokenizer.encode(text, add_special_tokens)


def fitted(
    model: ServedModel, request: GenerationRequest, prompts: list[list[int]]
) -> list[list[int]]:
    """The prompts, truncated as asked. Raises ApiError for one that is empty or leaves no room."""
    prompts = [_truncate(model, request, prompt) for prompt in prompts]
    for prompt in prompts:
        if len(prompt) >= model.max_model_len:
            raise PromptTooLong(model.max_model_len, len(prompt))
        if not prompt:
            raise ApiError(400, "prompt: expected at least one token.", "prompt")
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
    """The job of `fitted` prompts. Raises ApiError and InputError.

    `params`: for an empty context. `form`: constraint of the output. `media`: of the only prompt.
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
    handling = Handling(
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
        handling=arrival.salted(handling),
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
    """Refuse a text that is too long for any tokenization, before the cost of tokenizing."""
    if request.truncate_prompt_tokens is not None:
        return
    at_least = len(text) // model.tokenizer.max_token_chars
    if at_least >= model.max_model_len:
        raise PromptTooLong(model.max_model_len, at_least, is_at_least=True)
