"""Jobs that generate nothing: texts and tokens whose vectors or scores are asked for."""

from dataclasses import replace
from typing import Any

from qserve import scoring
from qserve.handling import Handling
from qserve.pooling_config import PoolingConfig
from qserve.pooling_params import ALL, LABELS, PoolingParams
from qserve.pooling_text import input_tokens
from qserve.sampling_params import SamplingParams
from qserve.server import unsupported
from qserve.server.errors import ApiError
from qserve.server.job import Job, check_truncation, check_vocabulary, new_job
from qserve.server.pooling_protocol import (
    EmbeddingRequest,
    PooledRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from qserve.server.protocol import read
from qserve.server.served_model import ServedModel

TASKS = {None: None, "embed": None, "token_embed": ALL, "classify": LABELS}
# fields of other servers that would change the answer: the values that do not
UNSUPPORTED = {
    "messages": (),
    "embedding_types": (),
    "additional_data": (),
    "mm_processor_kwargs": (),
    "softmax": (),
    "activation": (),
    "use_activation": (True,),
    "max_tokens_per_doc": (),
}


def embedding_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /v1/embeddings. Raises ApiError and InputError."""
    request = read(body, EmbeddingRequest)
    config = _checked(model, request)
    if not config.is_embedder:
        raise ApiError(
            404,
            "This server has a language model, which makes no embeddings: its folder has no"
            " modules.json. Ask a server of an embedding model; /pooling gives hidden states.",
        )
    return _vectors_job(model, request, config, None, "embd", arrived)


def pooling_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /pooling. Raises ApiError and InputError."""
    request = read(body, PoolingRequest)
    config = _checked(model, request)
    return _vectors_job(model, request, config, TASKS[request.task], "pool", arrived)


def score_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /score. Raises ApiError and InputError."""
    request = read(body, ScoreRequest)
    pairs = scoring.pairs(request.text_1, request.text_2)
    return _pairs_job(model, request, pairs, "score", arrived, {})


def rerank_job(model: ServedModel, body: bytes | bytearray, arrived: float) -> Job:
    """The job of a body of /rerank. Raises ApiError and InputError."""
    request = read(body, RerankRequest)
    pairs = [(request.query, document) for document in request.documents]
    repeated = {
        "top_n": request.top_n or len(pairs),
        "documents": request.documents if request.return_documents is not False else None,
    }
    return _pairs_job(model, request, pairs, "rerank", arrived, repeated)


def _vectors_job(
    model: ServedModel,
    request: EmbeddingRequest,
    config: PoolingConfig,
    kind: str | None,
    prefix: str,
    arrived: float,
) -> Job:
    params = PoolingParams(kind=kind, dimensions=request.dimensions, normalize=request.normalize)
    params = config.complete(params)
    name, special = request.prompt_name, request.add_special_tokens is not False
    prompts = [
        input_tokens(config, model.tokenizer, item, name, add_special_tokens=special)
        if isinstance(item, str)
        else item
        for item in request.input
    ]
    repeated = {"encoding_format": request.encoding_format or "float"}
    return _job(model, request, prompts, params, prefix, arrived, repeated)


def _pairs_job(
    model: ServedModel,
    request: ScoreRequest | RerankRequest,
    pairs: list[tuple[str, str]],
    prefix: str,
    arrived: float,
    repeated: dict[str, Any],
) -> Job:
    """A prompt for each pair of a reranker; of an embedding model, one for each text."""
    config = _checked(model, request)
    if not (config.is_reranker or config.is_embedder):
        raise ApiError(
            404,
            "This server has a language model, which scores no texts: its folder says neither how"
            " to embed nor how to score (modules.json). Ask a server of such a model.",
        )
    params = scoring.score_params(config, model.tokenizer)
    if config.is_reranker:
        instruction = request.instruction or scoring.INSTRUCTION
        prompts = [scoring.pair_tokens(model.tokenizer, *pair, instruction) for pair in pairs]
    else:
        if request.instruction is not None:
            raise ApiError(
                400, "instruction: expected with a reranker; this model embeds.", "instruction"
            )
        texts = {text: None for pair in pairs for text in pair}
        places = {text: place for place, text in enumerate(texts)}
        prompts = [input_tokens(config, model.tokenizer, text) for text in texts]
        repeated["pairs"] = [[places[first], places[second]] for first, second in pairs]
    return _job(model, request, prompts, params, prefix, arrived, repeated)


def _checked(model: ServedModel, request: PooledRequest) -> PoolingConfig:
    """What can be refused before anything is encoded; then how the model pools."""
    model.check_name(request.model)
    unsupported.refuse(request.model_extra, UNSUPPORTED)
    check_truncation(model, request.truncate_prompt_tokens)
    return PoolingConfig.from_folder(model.tokenizer.folder)


def _job(
    model: ServedModel,
    request: PooledRequest,
    prompts: list[list[int]],
    params: PoolingParams,
    prefix: str,
    arrived: float,
    repeated: dict[str, Any],
) -> Job:
    longest, kept = model.max_model_len - 1, request.truncate_prompt_tokens
    if kept is not None:
        # The start, unlike a prompt that is continued; what a tokenizer appends is kept.
        room = longest if kept == -1 else kept
        last = model.tokenizer.special_affixes[1]
        prompts = [_cut(prompt, room, last) for prompt in prompts]
    for prompt in prompts:
        if not 0 < len(prompt) <= longest:
            raise ApiError(
                400,
                f"This model takes 1 to {longest} tokens, and an input has {len(prompt)}."
                " Shorten it, or set truncate_prompt_tokens.",
                "input_tokens",
            )
        check_vocabulary(model, prompt, "input")
    ignored = unsupported.unknown(request.model_extra, UNSUPPORTED)
    if request.user is not None:
        ignored.append("user")
    handling = Handling(
        priority=request.priority or 0,
        cache_salt=request.cache_salt or "",
        lora=model.adapter(request.model),
    )
    return new_job(
        prefix,
        prompts=prompts,
        params=[SamplingParams(max_tokens=1)] * len(prompts),
        asked_id=request.request_id,
        ignored=tuple(ignored),
        repeated=repeated,
        handling=replace(handling, pooling=params),
        arrived=arrived,
    )


def _cut(prompt: list[int], room: int, last: list[int]) -> list[int]:
    """The start of a prompt, with the tokens that end it where it has them and there is room."""
    if len(prompt) <= room:
        return prompt
    ends = bool(last) and prompt[-len(last) :] == list(last) and len(last) < room
    return [*prompt[: room - len(last)], *last] if ends else prompt[:room]
