"""Request models and jobs of the endpoints for embeddings, pooling, classes and scores."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from qserve.multimodal.media import MediaItem
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams
from qserve.pooling import scoring
from qserve.pooling.config import PoolingConfig
from qserve.pooling.params import ALL, LABELS, PoolingParams
from qserve.pooling.text import input_tokens
from qserve.server.http.errors import ApiError
from qserve.server.requests import unsupported
from qserve.server.requests.field_errors import field_error
from qserve.server.requests.job import Arrival, Job, check_truncation, check_vocabulary, new_key
from qserve.server.requests.protocol import (
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    ONE_ERROR,
    PROMPT_FORMS,
    Body,
    CacheSalt,
    Message,
    at_most,
    check_messages,
    check_request_id,
    read,
)
from qserve.server.requests.score_sides import (
    Picture,
    Side,
    as_list,
    not_empty,
    only_texts,
    ranked_prompts,
    shortened,
    shown,
)
from qserve.server.requests.served_model import ServedModel

MAX_INPUTS = 2048  # OpenAI's limit
# vLLM's alternative names for the two texts of a score
PAIR_NAMES = (
    ("text_1", "text_2"),
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
)


def _inputs(value: Any) -> list[str | list[int]]:
    """Convert every form of `input` to a list, each item text or token ids."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list):
        raise field_error(f"expected {PROMPT_FORMS}", "send one of these")
    if not 1 <= len(value) <= MAX_INPUTS:
        raise field_error(
            f"expected 1 to {MAX_INPUTS} inputs, found {len(value)}",
            "send several requests" if value else "add one",
        )
    for item in value:
        is_ids = isinstance(item, list) and all(type(token) is int for token in item)
        if not isinstance(item, str) and not is_ids:
            raise field_error(f"expected {PROMPT_FORMS}", "send one of these")
        if not item:
            raise field_error("expected an input that is not empty", "write one")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _some(value: list[Any]) -> list[Any]:
    if not value:
        raise field_error("expected at least one text", "add one")
    return value


def _top_n(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise field_error("expected 1 or more, or 0 for all", "leave it out for all")
    return value


Text = Annotated[str, AfterValidator(not_empty)]
Sides = Annotated[list[Side], ONE_ERROR, at_most(MAX_INPUTS, "texts"), BeforeValidator(as_list)]
MaybeSides = Annotated[
    list[Side] | None, ONE_ERROR, at_most(MAX_INPUTS, "texts"), BeforeValidator(as_list)
]
MaybeTexts = Annotated[
    list[Text] | None, ONE_ERROR, at_most(MAX_INPUTS, "texts"), BeforeValidator(_as_list)
]


class PooledRequest(Body):
    """Fields that all pooling requests have. None: not set."""

    model: str | None = None
    request_id: Annotated[str | None, AfterValidator(check_request_id)] = None
    user: str | None = None
    priority: int | None = None
    cache_salt: CacheSalt = None
    truncate_prompt_tokens: int | None = None


class InputRequest(PooledRequest):
    """Fields of requests that have inputs, or the messages of one conversation."""

    input: Annotated[Any, AfterValidator(_inputs)] = None
    messages: Annotated[list[Message] | None, ONE_ERROR, at_most(MAX_MESSAGES, "messages")] = None
    add_generation_prompt: bool | None = None  # only with messages
    continue_final_message: bool | None = None  # only with messages
    add_special_tokens: bool | None = None


class EmbeddingRequest(InputRequest):
    """The body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str | None, at_most(MAX_NAME_CHARS, "characters")] = None


class ClassifyRequest(InputRequest):
    """The body of POST /classify."""


class PoolingRequest(EmbeddingRequest):
    """The body of POST /pooling."""

    task: Literal["embed", "token_embed", "classify"] | None = None


def _limit(value: int | None) -> int | None:
    if value is not None and value < 0:
        raise field_error(
            "expected a number of tokens, or 0 for no limit", "leave it out for no limit"
        )
    return value


TokenLimit = Annotated[int | None, AfterValidator(_limit)]


class ScoreRequest(PooledRequest):
    """The body of POST /score. Scores one text against each of several texts, or pairs of texts.

    The two sides have any of the names in PAIR_NAMES.
    """

    text_1: MaybeSides = None
    text_2: MaybeSides = None
    queries: MaybeSides = None
    documents: MaybeSides = None
    items: MaybeSides = None
    data_1: MaybeSides = None
    data_2: MaybeSides = None
    instruction: str | None = None
    max_tokens_per_doc: TokenLimit = None

    @property
    def side_names(self) -> tuple[str, str]:
        """The fields of both sides. Raises ApiError(400) unless exactly one pair is set."""
        given = {name for pair in PAIR_NAMES for name in pair if getattr(self, name) is not None}
        for first, second in PAIR_NAMES:
            if given == {first, second}:
                return first, second
        names = next(({*pair} for pair in PAIR_NAMES if given & {*pair}), {PAIR_NAMES[0][0]})
        param = min(names - given or names)
        forms = ", ".join(" and ".join(pair) for pair in PAIR_NAMES)
        raise ApiError(
            400,
            f"{param}: expected one of these pairs of fields: {forms}.",
            "Send one pair.",
            param,
        )


class RerankRequest(PooledRequest):
    """The body of POST /rerank."""

    query: Side
    documents: Annotated[Sides, AfterValidator(_some)]
    top_n: Annotated[int | None, AfterValidator(_top_n)] = None
    return_documents: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: TokenLimit = None


class EmbedPart(Body):
    type: Literal["text"]
    text: str


class EmbedInput(Body):
    content: Annotated[list[EmbedPart], ONE_ERROR]


class EmbedRequest(PooledRequest):
    """The body of Cohere's POST /v2/embed."""

    texts: MaybeTexts = None
    inputs: Annotated[list[EmbedInput] | None, ONE_ERROR, at_most(MAX_INPUTS, "inputs")] = None
    input_type: Annotated[str | None, at_most(MAX_NAME_CHARS, "characters")] = None
    embedding_types: Annotated[
        list[Literal["float", "base64", "binary", "ubinary"]] | None,
        ONE_ERROR,
        at_most(4, "types"),
    ] = None
    output_dimension: int | None = None
    max_tokens: TokenLimit = None  # limit per text
    truncate: Literal["NONE", "START", "END"] | None = None

    @property
    def all_texts(self) -> list[str]:
        """The texts, one per vector. Raises ApiError(400) if there are none."""
        if bool(self.texts) == bool(self.inputs):
            raise ApiError(
                400,
                "texts: expected either texts or inputs, with at least one item.",
                "Send one of the two.",
                "texts",
            )
        if self.texts:
            return self.texts
        return ["\n".join(part.text for part in each.content) for each in self.inputs]


TASKS = {None: None, "embed": None, "token_embed": ALL, "classify": LABELS}
# Cohere's input type -> names that models use for the prompt of such inputs
PROMPT_NAMES = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
}


def embedding_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/embeddings. Raises ApiError and InputError."""
    request = read(body, EmbeddingRequest)
    config = _embedder(model, request)
    return _vectors_job(model, request, config, _params(request), "embd-", arrival)


def pooling_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /pooling. Raises ApiError and InputError."""
    request = read(body, PoolingRequest)
    config = _checked(model, request)
    params = replace(_params(request), kind=TASKS[request.task])
    return _vectors_job(model, request, config, params, "pool-", arrival)


def classify_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /classify. Raises ApiError and InputError."""
    request = read(body, ClassifyRequest)
    config = _checked(model, request)
    params = PoolingParams(kind=LABELS)
    return _vectors_job(model, request, config, params, "classify-", arrival, labels=config.labels)


def embed_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of Cohere's /v2/embed. Raises ApiError and InputError."""
    request = read(body, EmbedRequest)
    config = _embedder(model, request)
    params = config.complete(PoolingParams(dimensions=request.output_dimension))
    known = PROMPT_NAMES.get(request.input_type, (request.input_type,))
    name = next((each for each in known if each in config.prompts), None)
    texts, room = request.all_texts, request.max_tokens or None
    prompts = [input_tokens(config, model.tokenizer, text, name) for text in texts]
    if request.truncate == "NONE" and room is not None:
        longest = max(map(len, prompts))
        if longest > room:
            raise ApiError(
                400,
                f"max_tokens: expected at least {longest} with truncate: NONE.",
                "Raise max_tokens, or set another truncate.",
                "max_tokens",
            )
    elif request.truncate != "NONE":
        room = min(room or model.max_model_len, model.max_model_len)
        affixes, is_start = model.tokenizer.special_affixes, request.truncate == "START"
        prompts = [_cut(prompt, room, affixes, from_start=is_start) for prompt in prompts]
    repeated = {"embedding_types": request.embedding_types or ["float"], "texts": texts}
    job = _job(model, request, prompts, params, "embed-", arrival, repeated)
    is_unread = request.input_type is not None and name is None
    return replace(job, ignored=(*job.ignored, *["input_type"] * is_unread))


def score_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /score. Raises ApiError and InputError."""
    request = read(body, ScoreRequest)
    first, second = request.side_names
    sides = getattr(request, first), getattr(request, second)
    pairs = scoring.pairs(*sides, names=(first, second))
    return _pairs_job(model, request, pairs, second, arrival, {})


def rerank_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /rerank. Raises ApiError and InputError."""
    request = read(body, RerankRequest)
    pairs = [(request.query, document) for document in request.documents]
    shows = request.return_documents is not False
    repeated = {
        "top_n": request.top_n or len(pairs),
        "documents": list(map(shown, request.documents)) if shows else None,
    }
    return _pairs_job(model, request, pairs, "documents", arrival, repeated)


def _params(request: EmbeddingRequest) -> PoolingParams:
    return PoolingParams(dimensions=request.dimensions, normalize=request.normalize)


def _vectors_job(
    model: ServedModel,
    request: InputRequest,
    config: PoolingConfig,
    params: PoolingParams,
    prefix: str,
    arrival: Arrival,
    **repeated: Any,
) -> Job:
    params = config.complete(params)
    repeated["encoding_format"] = getattr(request, "encoding_format", None) or "float"
    prompts = _prompts(model, request, config)
    return _job(model, request, prompts, params, prefix, arrival, repeated)


def _prompts(model: ServedModel, request: InputRequest, config: PoolingConfig) -> list[list[int]]:
    """Tokenize the inputs, or the conversation as the chat template renders it."""
    if (request.input is None) == (request.messages is None):
        raise ApiError(
            400, "input: expected either input or messages.", "Send one of the two.", "input"
        )
    if request.messages is None:
        name = getattr(request, "prompt_name", None)
        special = request.add_special_tokens is not False
        return [
            input_tokens(config, model.tokenizer, item, name, add_special_tokens=special)
            if isinstance(item, str)
            else item
            for item in request.input
        ]
    check_messages(request.messages)
    for index, message in enumerate(request.messages):
        if message.has_media:
            name = f"messages.{index}.content"
            raise ApiError(
                400, f"{name}: images and videos are not embedded.", "Send text only.", name
            )
    tokens = model.tokenizer.encode_chat(
        [message.for_template for message in request.messages],
        add_generation_prompt=bool(request.add_generation_prompt),
        continue_final_message=bool(request.continue_final_message),
    )
    before, after = model.tokenizer.special_affixes if request.add_special_tokens else ([], [])
    return [[*before, *tokens, *after]]


def _pairs_job(
    model: ServedModel,
    request: ScoreRequest | RerankRequest,
    pairs: list[tuple[str | Picture, str | Picture]],
    name: str,
    arrival: Arrival,
    repeated: dict[str, Any],
) -> Job:
    """Return the job for scores: a prompt per pair (reranker), or per distinct text (embedder).

    `name`: the field with the documents, for errors.
    """
    prefix = "rerank-" if isinstance(request, RerankRequest) else "score-"
    config = _checked(model, request)
    if not (config.is_reranker or config.is_embedder):
        raise ApiError(
            404,
            "This model cannot score texts: its folder has no modules.json that configures an"
            " embedding model or a reranker.",
            "Serve such a model.",
        )
    params = scoring.score_params(config, model.tokenizer)
    if limit := request.max_tokens_per_doc:
        pairs = [(query, shortened(model, document, limit)) for query, document in pairs]
    if request.instruction is not None and (config.ranks_pairs or not config.is_reranker):
        kind = "this reranker takes none" if config.ranks_pairs else "this is an embedding model"
        raise ApiError(
            400,
            f"instruction: requires a reranker; {kind}.",
            "Leave instruction out.",
            "instruction",
        )
    media: list[tuple[MediaItem, ...]] = []
    if config.ranks_pairs:
        prompts, media = ranked_prompts(model, pairs, name)
    else:
        texts = only_texts(pairs, name)
        if config.is_reranker:
            instruction = request.instruction or scoring.INSTRUCTION
            prompts = [scoring.pair_tokens(model.tokenizer, *pair, instruction) for pair in texts]
        else:
            distinct = {text: None for pair in texts for text in pair}
            places = {text: place for place, text in enumerate(distinct)}
            prompts = [input_tokens(config, model.tokenizer, text) for text in distinct]
            repeated["pairs"] = [[places[first], places[second]] for first, second in texts]
    job = _job(model, request, prompts, params, prefix, arrival, repeated)
    return replace(job, media=media) if any(media) else job


def _embedder(model: ServedModel, request: PooledRequest) -> PoolingConfig:
    """Do `_checked`, and raise ApiError unless the model is an embedding model."""
    config = _checked(model, request)
    if not config.is_embedder:
        raise ApiError(
            404,
            "This model cannot embed: its folder has no modules.json.",
            "Serve an embedding model; or use /pooling, which returns hidden states.",
        )
    return config


def _checked(model: ServedModel, request: PooledRequest) -> PoolingConfig:
    """Check a request before its texts are encoded. Returns the model's pooling configuration."""
    model.check_name(request.model)
    unsupported.refuse(request.model_extra, unsupported.POOLING, hints=unsupported.POOLING_HINTS)
    check_truncation(model.max_model_len, request.truncate_prompt_tokens)
    return PoolingConfig.from_folder(model.tokenizer.folder)


def _job(
    model: ServedModel,
    request: PooledRequest,
    prompts: list[list[int]],
    params: PoolingParams,
    prefix: str,
    arrival: Arrival,
    repeated: dict[str, Any],
) -> Job:
    longest, kept = model.max_model_len, request.truncate_prompt_tokens
    if kept is not None:
        # Unlike generation, keep the start, and the special tokens that the tokenizer appends.
        room = longest if kept == -1 else kept
        prompts = [_cut(prompt, room, model.tokenizer.special_affixes) for prompt in prompts]
    for prompt in prompts:
        if not 0 < len(prompt) <= longest:
            field = "truncate" if isinstance(request, EmbedRequest) else "truncate_prompt_tokens"
            raise ApiError(
                400,
                f"This model takes 1 to {longest} tokens, and an input has {len(prompt)}.",
                f"Shorten it, or set {field}.",
                "input_tokens",
            )
        check_vocabulary(model, prompt, "input")
    ignored = unsupported.unknown(request.model_extra, unsupported.POOLING)
    if request.user is not None:
        ignored.append("user")
    options = RequestOptions(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        pooling=params,
        lora=model.adapter(request.model),
    )
    return Job(
        prefix=prefix,
        name=arrival.named(request.request_id),
        key=new_key(prefix),
        arrival=arrival,
        prompts=prompts,
        params=[SamplingParams(max_tokens=1)] * len(prompts),
        ignored=tuple(ignored),
        repeated=repeated,
        options=arrival.salted(options),
    )


def _cut(
    prompt: list[int],
    room: int,
    affixes: tuple[list[int], list[int]],
    *,
    from_start: bool = False,
) -> list[int]:
    """Cut a prompt to `room` tokens at its end, or at its start with `from_start`.

    The tokenizer's special tokens at the cut side are kept if there is room.
    """
    if len(prompt) <= room:
        return prompt
    first, last = affixes
    if from_start:
        begins = bool(first) and prompt[: len(first)] == list(first) and len(first) < room
        return [*first, *prompt[len(first) - room :]] if begins else prompt[-room:]
    ends = bool(last) and prompt[-len(last) :] == list(last) and len(last) < room
    return [*prompt[: room - len(last)], *last] if ends else prompt[:room]
