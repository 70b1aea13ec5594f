"""Reads the fields of a request for sampling, beam search and the grammar of the output."""

from typing import Any

from qserve.errors import LEAVE_OUT, ParameterError
from qserve.params.beam_search_params import BeamSearchParams
from qserve.params.generation_defaults import DEFAULTED
from qserve.params.sampling_params import MAX_LOGPROBS, SamplingParams
from qserve.server.http.errors import ApiError
from qserve.server.requests.protocol import (
    MAX_ALL_STOP_CHARS,
    MAX_TEMPERATURE,
    ChatCompletionRequest,
    GenerationRequest,
)
from qserve.server.requests.served_model import ServedModel
from qserve.structured.grammar import check_grammar, unenforced
from qserve.structured.params import FIELD, StructuredOutputsParams, as_structured_outputs

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions; chats may fill the context
# sampling fields without effect in a beam search, which does not sample
WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "min_p", "seed")
# fields that beam search does not support -> values that are accepted, since they have no effect
NOT_IN_SEARCH: dict[str, tuple] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
}
# fields that require beam search -> values that are accepted without it
ONLY_IN_SEARCH: dict[str, tuple] = {"length_penalty": (1,), "early_stopping": (False,)}
NO_BEST_OF = (
    "best_of: requires use_beam_search, where it is the number of beams.",
    "Without beam search set n, leave best_of out or equal to n, and pick one of the choices.",
)
RESPONSE_FORMAT = "response_format"
FORM_TYPES = ("text", "json_object", "json_schema", "structural_tag")


def sampling_params(
    request: GenerationRequest, defaults: dict[str, float], room: int
) -> SamplingParams:
    """Return the parameters for a prompt that leaves `room` tokens. Raises ParameterError.

    A field that the request omits gets the model's default, or else OpenAI's.
    """
    _check_limits(request)
    max_tokens, logprobs, prompt_logprobs = request.max_tokens, None, request.prompt_logprobs
    if request.max_completion_tokens is not None:
        max_tokens = request.max_completion_tokens
        if max_tokens < 1:
            raise ParameterError(
                "max_completion_tokens", f"expected 1 or more, found {max_tokens}", LEAVE_OUT
            )
    if isinstance(request, ChatCompletionRequest):
        if max_tokens is None:
            max_tokens = room
        if request.logprobs:
            logprobs = request.top_logprobs or 0
            if not 0 <= logprobs <= MAX_LOGPROBS:
                raise ParameterError(
                    "top_logprobs", f"expected 0 to {MAX_LOGPROBS}, found {logprobs}", LEAVE_OUT
                )
    else:
        logprobs = request.logprobs
        if max_tokens is None:
            max_tokens = COMPLETION_MAX_TOKENS
        if request.echo and (logprobs is not None or max_tokens == 0):
            # An echo has log probabilities of the prompt; max_tokens: 0 is useful only with them.
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
        given = {k: v for k, v in given.items() if k not in WITHOUT_EFFECT}
    return SamplingParams(**(defaults | given), max_tokens=min(max_tokens, room))


def _check_limits(request: GenerationRequest) -> None:
    """Raise ParameterError for values beyond the server's limits, which SamplingParams accepts."""
    temperature = request.temperature
    if temperature is not None and not 0 <= temperature <= MAX_TEMPERATURE:
        raise ParameterError(
            "temperature", f"expected 0 to {MAX_TEMPERATURE}, found {temperature}", LEAVE_OUT
        )
    count = sum(map(len, request.stop or ()))
    if count > MAX_ALL_STOP_CHARS:
        raise ParameterError(
            "stop",
            f"expected at most {MAX_ALL_STOP_CHARS} characters in all, found {count}",
            "send fewer or shorter texts",
        )


def beam_search(
    request: GenerationRequest, form: StructuredOutputsParams | None = None
) -> BeamSearchParams | None:
    """Read vLLM's beam search fields; None: no beam search. Raises ApiError and ParameterError.

    The search has `best_of` beams, by default `n`, and returns the best `n` of them.
    """
    if not request.use_beam_search:
        _check_no_search(request)
        return None
    for name, neutral in NOT_IN_SEARCH.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(
                400, f"{name}: cannot be combined with use_beam_search.", f"Leave {name} out.", name
            )
    if form is not None:
        raise ApiError(
            400,
            "use_beam_search: cannot be combined with response_format, structured_outputs or a"
            " required tool call.",
            "Leave use_beam_search out, or the others.",
            "use_beam_search",
        )
    if request.max_tokens == 0:
        raise ApiError(
            400,
            "max_tokens: expected 1 or more with use_beam_search.",
            "Raise max_tokens.",
            "max_tokens",
        )
    num_returned = 1 if request.n is None else request.n
    width = num_returned if request.best_of is None else request.best_of
    if isinstance(request, ChatCompletionRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
    else:
        logprobs = request.logprobs
    return BeamSearchParams(
        beam_width=width,
        n=num_returned,
        length_penalty=1.0 if request.length_penalty is None else request.length_penalty,
        early_stopping=request.early_stopping or False,
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=logprobs,
    )


def ignored_in_search(request: GenerationRequest) -> list[str]:
    """Return the names of fields that are set and have no effect in a beam search."""
    if not request.use_beam_search:
        return []
    return [name for name in WITHOUT_EFFECT if getattr(request, name) is not None]


def _check_no_search(request: GenerationRequest) -> None:
    # The best n of n outputs are all of them. LangChain sends best_of with every n above 1.
    if request.best_of not in (None, 1, request.n or 1):
        raise ApiError(400, *NO_BEST_OF, "best_of")
    for name, neutral in ONLY_IN_SEARCH.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(
                400,
                f"{name}: requires use_beam_search.",
                f"Set use_beam_search: true, or leave {name} out.",
                name,
            )


def output_form(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Read the grammar of the output, and run its fast checks; None: any text.

    Raises ApiError(400), and InputError if llguidance is not installed.
    """
    asked, form = request.response_format, None
    if asked is not None:
        form = _of_response_format(asked)
        if form is not None and request.structured_outputs is not None:
            message = "response_format and structured_outputs cannot both be set."
            raise ApiError(400, message, "Set only one of them.", RESPONSE_FORMAT)
    try:
        if form is None:
            form = as_structured_outputs(request.structured_outputs)
        if form is not None:
            check_grammar(form)
    except ParameterError as error:
        param = error.subject if request.structured_outputs is not None else RESPONSE_FORMAT
        raise ApiError.relayed(400, f"{param}: {error.problem} ({error.remedy}).", param) from None
    return form


def form_param(request: GenerationRequest) -> str:
    """Return the name of the field with the grammar."""
    return RESPONSE_FORMAT if request.structured_outputs is None else FIELD


def form_warnings(
    model: ServedModel, form: StructuredOutputsParams | None, param: str
) -> list[str]:
    """Return a warning for each keyword of the grammar that is not enforced.

    With --structured-output-strict, raises ApiError(400) instead.
    """
    found = [f"{param}: {each}" for each in (unenforced(form) if form else ())]
    if found and model.structured_output_strict:
        raise ApiError(
            400,
            f"{found[0]:.600}. This server refuses such schemas (--structured-output-strict).",
            "Leave the keyword out.",
            param,
        )
    return found


def _of_response_format(asked: dict[str, Any]) -> StructuredOutputsParams | None:
    """Read OpenAI's response_format. Schemas are always enforced, whatever `strict` is."""
    kind = asked.get("type")
    if kind not in FORM_TYPES:
        known = ", ".join(FORM_TYPES)
        raise ApiError(
            400,
            f"response_format.type: expected one of {known}, found {kind!r:.100}.",
            "Use one of these.",
            RESPONSE_FORMAT,
        )
    if kind == "text":
        return None
    # llama.cpp, Together and others take a schema with type json_object, too.
    if kind == "json_object" and asked.get("schema") is None:
        return StructuredOutputsParams(json_object=True)
    if kind == "structural_tag":
        fields = {name: value for name, value in asked.items() if name != "type"}
        try:
            return StructuredOutputsParams(structural_tag=fields)
        except ParameterError as error:
            raise ApiError.relayed(
                400, f"{RESPONSE_FORMAT}: {error.problem} ({error.remedy}).", RESPONSE_FORMAT
            ) from None
    subject, expected = f"{RESPONSE_FORMAT}.schema", "a JSON schema"
    named = asked
    if kind == "json_schema":
        subject, expected = f"{RESPONSE_FORMAT}.json_schema", "an object with a name and a schema"
        named = asked.get("json_schema")
    if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
        raise ApiError(400, f"{subject}: expected {expected}.", "Add it.", RESPONSE_FORMAT)
    try:
        return StructuredOutputsParams(json=named["schema"])
    except ParameterError as error:
        raise ApiError.relayed(
            400, f"{subject}: {error.problem} ({error.remedy}).", RESPONSE_FORMAT
        ) from None
