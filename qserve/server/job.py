"""Job: a request's body made into prompts of tokens and sampling parameters. Knows no HTTP.

Making one blocks (parsing, the chat template, tokenizing), so routes have it prepared.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from qserve.bad_words import with_bad_words
from qserve.handling import DEFAULT, Handling
from qserve.output_parsing.output_parser import ParseSettings
from qserve.sampling_params import SamplingParams
from qserve.server import beam_fields, template_settings
from qserve.server.conversation_cut import most_that_fit
from qserve.server.errors import ApiError
from qserve.server.output_form import output_form
from qserve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    parse,
)
from qserve.server.sampling import sampling_params
from qserve.server.served_model import ServedModel
from qserve.server.tool_use import AUTO, NONE, REQUIRED, ToolUse, tool_use
from qserve.structured.params import StructuredOutputsParams

NUM_END_TOKENS = 16  # of the prompt: whether it begins or ends reasoning
MAX_CHOICES = 1024  # outputs of one request, over all its prompts


class PromptTooLong(ApiError):
    """A prompt that leaves no room for an answer in the model's context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts and for each its parameters. Choices are numbered prompt by prompt, n of each."""

    request_id: str  # of the reply; the route puts the request's name into it
    key: str  # of the engine's requests: no two jobs share it
    asked_id: str | None = None  # the name that the body states
    prompts: list[list[int]]
    params: list[SamplingParams] = field(default_factory=list)
    # the prompts' texts where the reply repeats them, else empty
    echoed: list[str] = field(default_factory=list)
    streams: bool = False
    streams_usage: bool = False  # in a chunk of its own, the last
    streams_usage_always: bool = False  # in each chunk
    prompt_logprobs: int | None = None  # alternatives that the reply tells of the prompt's tokens
    returns_token_ids: bool = False
    parsing: ParseSettings | None = None  # None: all text is content
    tokens_as_ids: bool = False  # log probabilities name tokens by their ids
    ignored: tuple[str, ...] = ()  # fields of the body that change nothing
    repeated: dict[str, Any] = field(default_factory=dict)  # of the body, for the reply
    arrived: float  # time.perf_counter() when the body had been read
    timeout: float | None = None  # seconds from then on that the answer may take
    handling: Handling = DEFAULT
    trace_headers: dict[str, str] = field(default_factory=dict)  # to which trace it belongs

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params[0].n

    @property
    def num_outputs(self) -> int:
        """Outputs that the engine computes: of a beam search, all of its beams."""
        search = self.handling.beam_search
        width = self.params[0].n if search is None else search.beam_width
        return len(self.prompts) * width

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_engine_tokens(self) -> int:
        """Prompt tokens that the engine is given: each prompt once for each of its outputs."""
        if self.handling.beam_search is not None:
            return self.num_prompt_tokens
        return self.num_prompt_tokens * self.params[0].n

    def num_cached(self, of_choices: Mapping[int, int]) -> int:
        """Prompt tokens that were cached, each prompt once: what the first of its outputs found.

        The others find the first one's pages, which it did compute.
        """
        firsts = range(0, self.num_choices, self.params[0].n)
        return sum(of_choices.get(index, 0) for index in firsts)

    def choice(self, index: int) -> tuple[list[int], SamplingParams]:
        """The prompt and parameters that the engine runs for one choice."""
        prompt, repeat = divmod(index, self.params[0].n)
        params = self.params[prompt]
        choice = params.choice(repeat)
        if choice.prompt_logprobs != params.prompt_logprobs:
            # Each choice of a reply has its own, also of the prompt.
            choice = replace(choice, prompt_logprobs=params.prompt_logprobs)
        return self.prompts[prompt], choice

    def prompt_of(self, index: int) -> list[int]:
        """The prompt alone: parameters are made anew and checked each time."""
        return self.prompts[index // self.params[0].n]

    def echo(self, index: int) -> str:
        """The text that one choice's reply begins with."""
        return self.echoed[index // self.params[0].n] if self.echoed else ""


def completion_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/completions. Raises ApiError and InputError."""
    request = parse(body, CompletionRequest)
    params = _checked_params(model, request, len(request.prompt))
    special = request.add_special_tokens is not False
    prompts = [
        _encode(model, prompt, special, request) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]
    skip = request.skip_special_tokens is not False
    echoed = [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip)
        for prompt in request.prompt
        if request.echo
    ]
    return _job(model, "cmpl", request, params, prompts, echoed, arrived)


def chat_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/chat/completions. Raises ApiError and InputError."""
    request = parse(body, ChatCompletionRequest)
    return chat_request_job(
        model, request, arrived, "chatcmpl", ignored=request.ignored, is_parsed=True
    )


def chat_request_job(
    model: ServedModel,
    request: ChatCompletionRequest,
    arrived: float,
    prefix: str,
    *,
    ignored: Sequence[str],
    is_parsed: bool = False,
    is_cut: bool = False,
    repeated: dict[str, Any] | None = None,
) -> Job:
    """The job of a chat's fields. Raises ApiError and InputError.

    `is_parsed`: its reply looks for reasoning and calls of tools.
    `is_cut`: a conversation that does not fit loses its beginning.
    """
    params = _checked_params(model, request, 1)
    use = tool_use(request, model)
    prompt = (_cut_chat_tokens if is_cut else chat_tokens)(model, request, use)
    job = _job(model, prefix, request, params, [prompt], [], arrived, use.form())
    of_template = template_settings.ignored(request, model.tokenizer)
    ignored = (*ignored, *beam_fields.ignored(request), *use.ignored(model), *of_template)
    job = replace(job, ignored=ignored, repeated=repeated or {})
    return _parsed(job, model, use) if is_parsed else job


def _parsed(job: Job, model: ServedModel, use: ToolUse) -> Job:
    """The same job, with what its reply looks for in the text."""
    parser = model.auto_tool_parser if use.mode == AUTO else None
    if parser is None and use.mode == NONE and model.reasoning_parser is None:
        return job
    (prompt,) = job.prompts
    parsing = ParseSettings(
        tool_parser=parser,
        is_required=use.mode == REQUIRED,
        named=use.named,
        tools=use.schemas,
        is_single=use.is_single,
        reasoning_parser=model.reasoning_parser,
        prompt_end=model.tokenizer.decode(prompt[-NUM_END_TOKENS:], skip_special_tokens=False),
    )
    params = job.params
    if any(map(model.tokenizer.is_hidden, parsing.markers)):
        params = [replace(each, skip_special_tokens=False) for each in params]
    prefix = parsing.grammar_prefix(model.tokenizer.is_hidden, model.tokenizer.is_in_template)
    if prefix and (form := params[0].structured_outputs):
        params = [replace(params[0], structured_outputs=replace(form, prefix=prefix))]
    return replace(job, parsing=parsing, params=params)


def chat_tokens(
    model: ServedModel,
    request: ChatCompletionRequest,
    use: ToolUse,
    *,
    checks_length: bool = True,
) -> list[int]:
    """The tokens of a conversation, before it is cut. Raises ApiError and InputError."""
    continues = bool(request.continue_final_message)
    settings = {
        "tools": use.for_template,
        "add_generation_prompt": not continues and request.add_generation_prompt is not False,
        "continue_final_message": continues,
        "template_kwargs": template_settings.settings(request, model.tokenizer),
    }
    messages = [message.for_template for message in request.messages]
    if model.chat_special_tokens:
        text = model.tokenizer.render_chat(messages, **settings)
        if checks_length:
            _check_length(model, text, request)
        prompt = model.tokenizer.encode(text, False)
    else:
        chat = model.tokenizer.chat_prompt(messages, **settings)
        if checks_length:
            _check_length(model, chat.text, request)
        prompt = chat.encode(model.tokenizer)
    if request.add_special_tokens:
        before, after = model.tokenizer.special_affixes
        prompt = [*before, *prompt, *after]
    return prompt


def _cut_chat_tokens(model: ServedModel, request: ChatCompletionRequest, use: ToolUse) -> list[int]:
    """The tokens of as much of a conversation as fits before its answer.

    An answer of no stated length needs one token. Raises ApiError and InputError.
    """
    asked = request.max_completion_tokens or request.max_tokens or 1
    found: dict[int, list[int]] = {}  # the tokens by the number of messages

    def fits(messages: list[Message]) -> bool:
        try:
            tokens = chat_tokens(model, request.model_copy(update={"messages": messages}), use)
        except PromptTooLong:
            return False
        found[len(messages)] = tokens
        return len(tokens) + asked <= model.max_model_len

    kept = most_that_fit(request.messages, fits)
    if len(kept) not in found:
        # What has to stay was not tried, or is too long for any answer.
        return chat_tokens(model, request.model_copy(update={"messages": kept}), use)
    return found[len(kept)]


def new_job(prefix: str, *, prompts: list[list[int]], arrived: float, **fields: Any) -> Job:
    """A job with a name of its own."""
    key = f"{prefix}-{uuid.uuid4().hex}"
    return Job(request_id=key, key=key, prompts=prompts, arrived=arrived, **fields)


def _checked_params(
    model: ServedModel, request: GenerationRequest, num_prompts: int
) -> SamplingParams:
    """Of a prompt that leaves all the room. Refuses what can be before any prompt is encoded."""
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
    search = beam_fields.beam_search(request)
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


def check_truncation(model: ServedModel, kept: int | None) -> None:
    """Raise ApiError(400) for a number of kept tokens that no prompt can have."""
    if kept is not None and not (kept == -1 or 1 <= kept < model.max_model_len):
        raise ApiError(
            400,
            f"truncate_prompt_tokens: expected 1 to {model.max_model_len - 1}, or -1 for as many as"
            f" fit, found {kept}.",
            "truncate_prompt_tokens",
        )


def _job(
    model: ServedModel,
    prefix: str,
    request: GenerationRequest,
    params: SamplingParams,
    prompts: list[list[int]],
    echoed: list[str],
    arrived: float,
    form: StructuredOutputsParams | None = None,
) -> Job:
    """`params`: of a prompt that leaves all the room. `form`: in place of the request's own."""
    form = form or output_form(request)
    search = beam_fields.beam_search(request, form)
    if form is not None:
        params = replace(params, structured_outputs=form)
    params = with_bad_words(params, lambda: model.tokenizer)
    params_of_room = {params.max_tokens: params}
    params_of_prompts = []
    prompts = [_truncate(model, request, prompt) for prompt in prompts]
    for prompt in prompts:
        room = model.max_model_len - len(prompt)
        if room < 1:
            raise _too_long(model, str(len(prompt)))
        if not prompt:
            raise ApiError(400, "prompt: expected at least one token.", "prompt")
        check_vocabulary(model, prompt, "prompt")
        most = min(params.max_tokens, room)
        if most not in params_of_room:
            params_of_room[most] = replace(params, max_tokens=most)
        params_of_prompts.append(params_of_room[most])
    return new_job(
        prefix,
        prompts=prompts,
        asked_id=request.request_id,
        params=params_of_prompts,
        echoed=echoed,
        streams=bool(request.stream),
        streams_usage=request.wants_usage,
        streams_usage_always=request.wants_usage_always,
        prompt_logprobs=request.prompt_logprobs,
        returns_token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
        ignored=(*request.ignored, *beam_fields.ignored(request)),
        arrived=arrived,
        handling=Handling(
            priority=request.priority or 0,
            cache_salt=request.cache_salt or "",
            beam_search=search,
            lora=model.adapter(request.model),
        ),
    )


def _encode(
    model: ServedModel, text: str, add_special_tokens: bool, request: GenerationRequest
) -> list[int]:
    _check_length(model, text, request)
    return model.tokenizer.encode(text, add_special_tokens)


def _truncate(model: ServedModel, request: GenerationRequest, prompt: list[int]) -> list[int]:
    """The end of a prompt, or with truncation_side: right its start, if it is to be cut."""
    kept = request.truncate_prompt_tokens
    if kept is None:
        return prompt
    if kept == -1:
        asked = request.max_completion_tokens or request.max_tokens or 1
        kept = max(1, model.max_model_len - asked)
    return prompt[:kept] if request.truncation_side == "right" else prompt[-kept:]


def _check_length(model: ServedModel, text: str, request: GenerationRequest) -> None:
    """Refuse a text whose length alone says that it cannot fit: tokenizing takes time."""
    if request.truncate_prompt_tokens is not None:
        return
    at_least = len(text) // model.tokenizer.max_token_chars
    if at_least >= model.max_model_len:
        raise _too_long(model, f"at least {at_least}")


def _too_long(model: ServedModel, length: str) -> PromptTooLong:
    limit = model.max_model_len
    return PromptTooLong(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{length} input tokens, and an answer needs at least one. Shorten the prompt.",
        "input_tokens",
    )


def check_vocabulary(model: ServedModel, token_ids: list[int] | tuple[int, ...], name: str) -> None:
    size = model.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(token for token in token_ids if not 0 <= token < size)
        raise ApiError(400, f"{name}: expected token ids of 0 to {size - 1}, found {wrong}.", name)
