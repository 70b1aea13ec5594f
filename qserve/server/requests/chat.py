"""Jobs of POST /v1/chat/completions, and of other APIs' requests after conversion to a chat."""

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from qserve.multimodal.media import MediaItem
from qserve.multimodal.reader import MediaUrl, ReadMedia
from qserve.output_parsing.output_parser import HARMONY, ParseSettings
from qserve.params.sampling_params import SamplingParams
from qserve.server.http.errors import ApiError
from qserve.server.requests.generation_job import (
    PromptTooLong,
    check_length,
    checked_params,
    fitted,
    generation_job,
)
from qserve.server.requests.generation_params import form_param, form_warnings, output_form
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.protocol import EFFORT, ChatCompletionRequest, Message, parse
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tool_use import AUTO, NAMED, NONE, REQUIRED, ToolUse, tool_use
from qserve.structured.params import StructuredOutputsParams
from qserve.text.tokenizer import Tokenizer

NUM_END_TOKENS = 16  # prompt tokens at the end that are searched for reasoning markers
BROKEN_ARGUMENTS = "not a JSON object, read as {}"
SYSTEM = ("system", "developer")
USER, TOOL = "user", "tool"
# Template variables that turn thinking on and off, for templates without reasoning_effort. As in
# vLLM, any effort except "none" turns thinking on.
SWITCHES = ("enable_thinking", "thinking")
NO_EFFORT = "none"
KWARGS = "chat_template_kwargs"
# chat fields that do not work with images and videos -> reason
NOT_WITH_MEDIA = {
    "truncate_prompt_tokens": "would cut images and videos",
    "use_beam_search": "runs on text only",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTokens:
    """Token ids of a conversation, and the media items at their positions."""

    ids: list[int]
    media: tuple[MediaItem, ...] = ()


def chat_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/chat/completions. Raises ApiError and InputError."""
    request = parse(body, ChatCompletionRequest)
    omits_reasoning = request.include_reasoning is False
    is_moot = omits_reasoning and model.reasoning_parser is None
    return chat_request_job(
        model,
        request,
        arrival,
        prefix="chatcmpl-",
        ignored=[*request.ignored, *["include_reasoning"] * is_moot],
        broken_arguments=request.broken_arguments,
        repeated={"omits_reasoning": omits_reasoning},
    )


def chat_request_job(
    model: ServedModel,
    request: ChatCompletionRequest,
    arrival: Arrival,
    *,
    prefix: str,
    ignored: Sequence[str],
    broken_arguments: Sequence[str],
    is_cut: bool = False,
    renamed: Mapping[str, str] | None = None,
    repeated: dict[str, Any] | None = None,
) -> Job:
    """Return the job of a chat request. Raises ApiError and InputError.

    prefix: start of the request id
    ignored: fields of the body without effect
    broken_arguments: fields with arguments of an earlier call that are not a JSON object
    is_cut: drop the beginning of a conversation that does not fit the context
    renamed: chat field -> name in the body, for warnings and ignored fields
    repeated: fields that the reply repeats
    """
    renamed = renamed or {}
    params = checked_params(model, request, 1)
    use = tool_use(request, model)
    prompt = (cut_chat_tokens if is_cut else chat_tokens)(model, request, use)
    form = use.form(model) if use.is_forced else output_form(request)
    param = "tools" if use.is_forced else form_param(request)
    warnings = form_warnings(model, form, renamed.get(param, param))
    warnings += [f"{name}: {BROKEN_ARGUMENTS}" for name in broken_arguments]
    if use.mode == AUTO:
        form = use.strict_form(model) if form is None else use.choice(form, model)
    prompts = fitted(model, request, [prompt.ids])
    is_own = use.mode == AUTO or (form is not None and form.only_calls)
    num_calls = sum(len(message.tool_calls or ()) for message in request.messages)
    parsing = _parsing(model, use, prompts[0], is_own, num_calls)
    if parsing is not None:
        params = _with_tokens(model, parsing, params)
        if form is not None:
            form = _behind_reasoning(model, parsing, form)
    of_template = unread_settings(request, model.tokenizer)
    names = [*ignored, *use.ignored(model, form), *of_template]
    return generation_job(
        model,
        request,
        arrival,
        prefix=prefix,
        prompts=prompts,
        params=params,
        form=form,
        ignored=[renamed.get(name, name) for name in names],
        warnings=warnings,
        parsing=parsing,
        repeated=repeated,
        media=prompt.media,
    )


def _parsing(
    model: ServedModel, use: ToolUse, prompt: list[int], is_own: bool, num_calls: int
) -> ParseSettings | None:
    """Return the settings for parsing the output; None: all text is content.

    is_own: calls are in the model's own format
    num_calls: number of tool calls in the conversation so far
    """
    parser = (model.auto_tool_parser or HARMONY) if is_own else None
    if parser is None and use.mode == NONE and model.reasoning_parser is None:
        return None
    return ParseSettings(
        tool_parser=parser,
        is_required=use.mode == REQUIRED,
        named=use.named,
        tools=use.schemas,
        is_single=use.is_single or use.mode == NAMED,
        reasoning_parser=model.reasoning_parser,
        prompt_end=model.tokenizer.decode(prompt[-NUM_END_TOKENS:], skip_special_tokens=False),
        num_calls_before=num_calls,
    )


def _with_tokens(
    model: ServedModel, parsing: ParseSettings, params: SamplingParams
) -> SamplingParams:
    """Return parameters that keep the parser's markers in the text, and stop at its end markers."""
    tokenizer = model.tokenizer
    if any(map(tokenizer.is_hidden, parsing.markers)):
        params = replace(params, skip_special_tokens=False)
    found = map(tokenizer.marker_token, parsing.stops)
    stops = [token for token in found if token is not None]
    return replace(params, stop_token_ids=(*params.stop_token_ids, *stops))


def _behind_reasoning(
    model: ServedModel, parsing: ParseSettings, form: StructuredOutputsParams
) -> StructuredOutputsParams:
    """Return a grammar that applies only after the model's reasoning."""
    token = model.tokenizer.marker_token
    return replace(
        form,
        prefix=parsing.grammar_prefix(token, model.tokenizer.is_in_template),
        opening=parsing.answer_opening(token),
    )


def chat_tokens(
    model: ServedModel,
    request: ChatCompletionRequest,
    use: ToolUse,
    *,
    checks_length: bool = True,
    known: ReadMedia | None = None,
) -> ChatTokens:
    """Render and tokenize a conversation, without truncation. Raises ApiError and InputError.

    `known`: media that were read before, see MediaReader.prepare.
    """
    urls = _checked_urls(model, request)
    continues = bool(request.continue_final_message)
    settings = {
        "tools": use.for_template,
        "add_generation_prompt": not continues and request.add_generation_prompt is not False,
        "continue_final_message": continues,
        "template_kwargs": template_variables(request, model.tokenizer),
    }
    messages = [message.for_template for message in request.messages]
    if model.tokenizer.needs_parts:
        messages = list(map(_with_parts, messages))
    if model.tokenizer.is_in_template("message.thinking"):
        messages = list(map(_with_thinking, messages))
    if model.chat_special_tokens:
        text = model.tokenizer.render_chat(messages, **settings)
        if checks_length:
            check_length(model, text, request)
        prompt = model.tokenizer.encode(text, False)
    else:
        chat = model.tokenizer.chat_prompt(messages, **settings)
        if checks_length:
            check_length(model, chat.text, request)
        prompt = chat.encode(model.tokenizer)
    if request.add_special_tokens:
        before, after = model.tokenizer.special_affixes
        prompt = [*before, *prompt, *after]
    if not urls or model.media is None:
        return ChatTokens(ids=prompt)
    ids, media = model.media.prepare(prompt, urls, {} if known is None else known)
    return ChatTokens(ids=ids, media=media)


def _checked_urls(model: ServedModel, request: ChatCompletionRequest) -> list[MediaUrl]:
    """Return the URLs of all media.

    If there are media, raises ApiError if the model or a field of the request takes text only.
    """
    urls = []
    for index, message in enumerate(request.messages):
        for number, part in enumerate(message.content or ()):
            if part.media_url is not None:
                model.check_takes(f"messages.{index}.content.{number}", part.kind)
                urls.append(MediaUrl(part.kind, part.media_url))
    for name, reason in NOT_WITH_MEDIA.items() if urls else ():
        if getattr(request, name) not in (None, False):
            raise ApiError(
                400, f"{name}: {reason}.", f"Remove {name}, or the images and videos.", name
            )
    return urls


def _with_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of parts, for templates that require this."""
    content = message["content"]
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning in the field `thinking`, which gpt-oss's template reads.

    A message with calls keeps its content instead: the template accepts only one of the two.
    """
    reasoning = message.get("reasoning_content")
    if not reasoning or (message["content"] and "tool_calls" in message):
        return message
    return {**message, "thinking": reasoning}


def cut_chat_tokens(model: ServedModel, request: ChatCompletionRequest, use: ToolUse) -> ChatTokens:
    """Tokenize a conversation, shortened so that prompt and max_tokens fit the context.

    Without max_tokens, one output token must fit. Raises ApiError and InputError.
    """
    asked = request.max_completion_tokens or request.max_tokens or 1
    found: dict[int, ChatTokens] = {}  # number of messages -> tokens
    known: ReadMedia = {}

    def tokens_of(messages: list[Message]) -> ChatTokens:
        shorter = request.model_copy(update={"messages": messages})
        return chat_tokens(model, shorter, use, known=known)

    def fits(messages: list[Message]) -> bool:
        try:
            tokens = tokens_of(messages)
        except PromptTooLong:
            return False
        found[len(messages)] = tokens
        return len(tokens.ids) + asked <= model.max_model_len

    kept = max_that_fit(request.messages, fits)
    if len(kept) not in found:
        # The shortest conversation was not tried before, or is too long for any output.
        return tokens_of(kept)
    return found[len(kept)]


def can_go(roles: Sequence[str]) -> list[list[int]]:
    """Return groups of message indices that may be dropped, in the order in which to drop them.

    OpenAI's `truncation: "auto"` drops single items from the beginning. Chat templates refuse an
    incomplete exchange, so groups are dropped as a whole. A group is a user message with the
    replies to it; after the last user message, a call with its outputs. System messages, the last
    user message and the last message are never dropped.
    """
    said = [place for place, role in enumerate(roles) if role not in SYSTEM]
    users = [at for at, place in enumerate(said) if roles[place] == USER]
    last = users[-1] if users else -1  # index into `said`; groups after it have no user message
    starts = {0, *users} if users else set()
    starts |= {at for at in range(last + 1, len(said)) if roles[said[at]] != TOOL}
    edges = [*sorted(starts), len(said)]
    groups = [said[a:b] for a, b in pairwise(edges) if a != last]
    # The model replies to the last message: the last user message, or else the last group.
    return groups if last == len(said) - 1 else groups[:-1]


def max_that_fit(messages: Sequence[Any], fits: Callable[[list[Any]], bool]) -> list[Any]:
    """Return the messages without as few groups as necessary.

    If nothing fits, return the shortest conversation. `fits` is called O(log n) times for n
    messages.
    """
    groups = can_go([message.role for message in messages])

    def without(count: int) -> list[Any]:
        gone = {place for group in groups[:count] for place in group}
        return [each for place, each in enumerate(messages) if place not in gone]

    if fits(list(messages)):
        return list(messages)
    counts = range(1, len(groups))
    return without(1 + bisect.bisect_left(counts, True, key=lambda count: fits(without(count))))


def template_variables(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template's variables. Raises ApiError if two different efforts are given."""
    given = _given_settings(request, tokenizer)
    effort = request.reasoning_effort
    if effort is not None and given.get(EFFORT, effort) != effort:
        raise ApiError(
            400,
            f"{EFFORT}: expected the same value as {KWARGS}.{EFFORT}, found {effort!r}.",
            "Send only one of the two.",
            EFFORT,
        )
    return _of_effort(effort, tokenizer) | given


def unread_settings(request: ChatCompletionRequest, tokenizer: Tokenizer) -> list[str]:
    """Return the names of fields that are set although the template does not read them.

    These fields are ignored, not refused: clients send the same fields to every model.
    """
    given, effort = _given_settings(request, tokenizer), request.reasoning_effort
    asked = request.chat_template_kwargs or {}
    names = [f"{KWARGS}.{name}" for name in asked if name not in given]
    is_read = EFFORT in given or _of_effort(effort, tokenizer).keys() - given
    return names + [EFFORT] * (effort is not None and not is_read)


def _given_settings(request: ChatCompletionRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the variables in `chat_template_kwargs` that the template reads.

    Raises ApiError for names that the server sets, and for values that a template could loop over.
    """
    given = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        param = f"{KWARGS}.{name}"
        if name in tokenizer.reserved_settings:
            raise ApiError(
                400, f"{param:.300}: is set by the server.", "Leave it out.", param[:300]
            )
        if name not in tokenizer.template_settings:
            continue
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ApiError(
                400,
                f"{param}: expected a boolean, a number or a string.",
                "Convert the value to one of these.",
                param,
            )
        given[name] = value
    return given


def _of_effort(effort: str | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the template variables for a reasoning effort."""
    if effort is None:
        return {}
    meanings = {EFFORT: effort} | dict.fromkeys(SWITCHES, effort != NO_EFFORT)
    return {name: meanings[name] for name in meanings if name in tokenizer.template_settings}
