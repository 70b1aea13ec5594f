"""The fields of a beam search in a request's body: what the engine is told, and what is refused."""

from qserve.beam_search_params import BeamSearchParams
from qserve.server.errors import ApiError
from qserve.server.protocol import ChatCompletionRequest, GenerationRequest
from qserve.structured.params import StructuredOutputsParams

# A beam search takes the likeliest tokens as the model tells them: nothing is drawn.
WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "min_p", "seed")
# fields that would change what the model tells, or end a beam at a text: the neutral values
REFUSED: dict[str, tuple] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "stop": ([],),
}
# fields that mean something in a beam search alone: the neutral values
OF_A_SEARCH: dict[str, tuple] = {"length_penalty": (1,), "early_stopping": (False,)}
BEST_OF = (
    "best_of: expected with use_beam_search, where it is the number of beams; without, use n and"
    " choose among the answers."
)


def beam_search(
    request: GenerationRequest, form: StructuredOutputsParams | None = None
) -> BeamSearchParams | None:
    """What a body asks for, as vLLM's fields say it; None: no beam search.

    `n` beams are returned of `best_of`, which is `n` where it is not set. Raises ApiError and
    ParameterError.
    """
    if not request.use_beam_search:
        _check_other(request)
        return None
    for name, neutral in REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: expected without use_beam_search.", name)
    if form is not None:
        raise ApiError(
            400,
            "use_beam_search: expected without response_format, structured_outputs and a tool that"
            " has to be called.",
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
    """Fields that are set and change nothing in a beam search, by name."""
    if not request.use_beam_search:
        return []
    return [name for name in WITHOUT_EFFECT if getattr(request, name) is not None]


def _check_other(request: GenerationRequest) -> None:
    if request.best_of not in (None, 1):
        raise ApiError(400, BEST_OF, "best_of")
    for name, neutral in OF_A_SEARCH.items():
        value = getattr(request, name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name}: expected with use_beam_search.", name)
