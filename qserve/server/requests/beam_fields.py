"""Beam search fields of a request, and fields that cannot be combined with them."""

from qserve.params.beam_search_params import BeamSearchParams
from qserve.server.http.errors import ApiError
from qserve.server.requests.protocol import ChatCompletionRequest, GenerationRequest
from qserve.structured.params import StructuredOutputsParams

# Sampling fields have no effect: beam search takes the likeliest tokens.
WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "min_p", "seed")
# fields that cannot be combined with beam search: the values without effect
REFUSED: dict[str, tuple] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
}
# fields that require beam search: the values without effect
OF_A_SEARCH: dict[str, tuple] = {"length_penalty": (1,), "early_stopping": (False,)}
BEST_OF = (
    "best_of: requires use_beam_search, where it is the number of beams. Otherwise use n and choose"
    " among the choices."
)


def beam_search(
    request: GenerationRequest, form: StructuredOutputsParams | None = None
) -> BeamSearchParams | None:
    """Read vLLM's beam search fields; None: no beam search.

    `n` beams are returned of `best_of`, which is `n` where it is not set. Raises ApiError and
    ParameterError.
    """
    if not request.use_beam_search:
        _check_other(request)
        return None
    for name, neutral in REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: cannot be combined with use_beam_search.", name)
    if form is not None:
        raise ApiError(
            400,
            "use_beam_search: cannot be combined with response_format, structured_outputs or a"
            " required tool call.",
            "use_beam_search",
        )
    if request.max_tokens == 0:
        raise ApiError(400, "max_tokens: expected 1 or more with use_beam_search.", "max_tokens")
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


def ignored(request: GenerationRequest) -> list[str]:
    """Names of fields that are set and have no effect in a beam search."""
    if not request.use_beam_search:
        return []
    return [name for name in WITHOUT_EFFECT if getattr(request, name) is not None]


def _check_other(request: GenerationRequest) -> None:
    if request.best_of not in (None, 1):
        raise ApiError(400, BEST_OF, "best_of")
    for name, neutral in OF_A_SEARCH.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: requires use_beam_search.", name)
