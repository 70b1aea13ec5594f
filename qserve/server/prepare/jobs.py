"""Tables: route -> function that prepares a request body."""

from collections.abc import Callable

from qserve.server.requests.chat import chat_job
from qserve.server.requests.completions import completion_job
from qserve.server.requests.job import Arrival, Job
from qserve.server.requests.pooling import (
    classify_job,
    embed_job,
    embedding_job,
    pooling_job,
    rerank_job,
    score_job,
)
from qserve.server.requests.responses import input_tokens_answer, responses_job
from qserve.server.requests.served_model import ServedModel
from qserve.server.requests.tokenize import detokenize_answer, tokenize_answer


def messages_job(model: ServedModel, body: bytes | bytearray, arrival: Arrival) -> Job:
    """Return the job of a body of /v1/messages. Imports the request models on the first call."""
    from qserve.server.requests.anthropic import messages

    return messages.messages_job(model, body, arrival)


def count_tokens_answer(model: ServedModel, body: bytes | bytearray) -> bytes:
    """Return the reply to a body of /v1/messages/count_tokens. Imports like `messages_job`."""
    from qserve.server.requests.anthropic import messages

    return messages.count_tokens_answer(model, body)


# Routes that run on the engine. The functions raise ApiError and InputError.
JOBS: dict[str, Callable[[ServedModel, bytes | bytearray, Arrival], Job]] = {
    "completions": completion_job,
    "chat": chat_job,
    "responses": responses_job,
    "messages": messages_job,
    "embeddings": embedding_job,
    "embed": embed_job,
    "classify": classify_job,
    "pooling": pooling_job,
    "score": score_job,
    "rerank": rerank_job,
}
# Routes that do not need the engine. The functions return the JSON reply; same errors.
ANSWERS: dict[str, Callable[[ServedModel, bytes | bytearray], bytes]] = {
    "count_tokens": count_tokens_answer,
    "input_tokens": input_tokens_answer,
    "tokenize": tokenize_answer,
    "detokenize": detokenize_answer,
}
# routes that never run the chat template
WITHOUT_TEMPLATE = frozenset({"completions", "detokenize"})
