"""Job: a request's body made into prompts of tokens and sampling parameters. Knows no HTTP.

Making one blocks (parsing, the chat template, tokenizing), so routes do it in a thread.
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qserve.handling import DEFAULT, Handling
from qserve.sampling_params import SamplingParams
from qserve.server.errors import ApiError
from qserve.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from qserve.server.sampling import sampling_params
from qserve.server.served_model import ServedModel

MAX_CHOICES = 1024  # outputs of one request, over all its prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts and for each its parameters. Choices are numbered prompt by prompt, n of each."""

    request_id: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    echoed: list[str]  # the prompts' texts where the reply repeats them, else empty
    streams: bool
    streams_usage: bool
    arrived: float  # time.perf_counter() when the body had been read
    handling: Handling = DEFAULT

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params[0].n

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_engine_tokens(self) -> int:
        """Prompt tokens that the engine is given: each prompt once for each of its outputs."""
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
        return self.prompts[prompt], self.params[prompt].choice(repeat)

    def echo(self, index: int) -> str:
        """The text that one choice's reply begins with."""
        return self.echoed[index // self.params[0].n] if self.echoed else ""


def completion_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/completions. Raises ApiError and InputError."""
    request = parse(body, CompletionRequest)
    _check(model, request, len(request.prompt))
    special = request.add_special_tokens is not False
    prompts = [
        _encode(model, prompt, special) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]
    skip = request.skip_special_tokens is not False
    echoed = [
        prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt, skip)
        for prompt in request.prompt
        if request.echo
    ]
    return _job(model, "cmpl", request, prompts, echoed, arrived)


def chat_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/chat/completions. Raises ApiError and InputError."""
    request = parse(body, ChatCompletionRequest)
    _check(model, request, 1)
    continues = bool(request.continue_final_message)
    settings = {
        "add_generation_prompt": not continues and request.add_generation_prompt is not False,
        "continue_final_message": continues,
        "template_kwargs": request.chat_template_kwargs,
    }
    messages = [message.for_template for message in request.messages]
    if model.chat_special_tokens:
        text = model.tokenizer.render_chat(messages, **settings)
        prompt = _encode(model, text, False)
    else:
        chat = model.tokenizer.chat_prompt(messages, **settings)
        _check_length(model, chat.text)
        prompt = chat.encode(model.tokenizer)
    return _job(model, "chatcmpl", request, [prompt], [], arrived)


# the body's job, by the name of its route
JOBS: dict[str, Callable[[ServedModel, bytes | bytearray, float], Job]] = {
    "completions": completion_job,
    "chat": chat_job,
}


def _check(model: ServedModel, request: GenerationRequest, num_prompts: int) -> None:
    """What can be refused before any prompt is encoded."""
    model.check_name(request.model)
    params = sampling_params(request, model.defaults, model.max_model_len)
    if num_prompts * params.n > MAX_CHOICES:
        raise ApiError(
            400,
            f"n: expected at most {MAX_CHOICES} choices, found {num_prompts} times {params.n}.",
            "n",
        )
    _check_vocabulary(model, params.stop_token_ids, "stop_token_ids")
    _check_vocabulary(model, [token for token, _ in params.logit_bias], "logit_bias")


def _job(
    model: ServedModel,
    prefix: str,
    request: GenerationRequest,
    prompts: list[list[int]],
    echoed: list[str],
    arrived: float,
) -> Job:
    params = []
    for prompt in prompts:
        room = model.max_model_len - len(prompt)
        if room < 1:
            raise _too_long(model, str(len(prompt)))
        if not prompt:
            raise ApiError(400, "prompt: expected at least one token.", "prompt")
        _check_vocabulary(model, prompt, "prompt")
        params.append(sampling_params(request, model.defaults, room))
    return Job(
        request_id=f"{prefix}-{uuid.uuid4().hex}",
        prompts=prompts,
        params=params,
        echoed=echoed,
        streams=bool(request.stream),
        streams_usage=request.wants_usage,
        arrived=arrived,
        handling=Handling(priority=request.priority or 0, cache_salt=request.cache_salt or ""),
    )


def _encode(model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
    _check_length(model, text)
    return model.tokenizer.encode(text, add_special_tokens)


def _check_length(model: ServedModel, text: str) -> None:
    """Refuse a text whose length alone says that it cannot fit: tokenizing takes time."""
    at_least = len(text) // model.tokenizer.max_token_chars
    if at_least >= model.max_model_len:
        raise _too_long(model, f"at least {at_least}")


def _too_long(model: ServedModel, length: str) -> ApiError:
    limit = model.max_model_len
    return ApiError(
        400,
        f"This model's maximum context length is {limit} tokens. However, your prompt contains "
        f"{length} input tokens, and an answer needs at least one. Shorten the prompt.",
        "input_tokens",
    )


def _check_vocabulary(
    model: ServedModel, token_ids: list[int] | tuple[int, ...], name: str
) -> None:
    size = model.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
        wrong = next(token for token in token_ids if not 0 <= token < size)
        raise ApiError(400, f"{name}: expected token ids of 0 to {size - 1}, found {wrong}.", name)
