"""The table of jobs: how the body of each route becomes one."""

from collections.abc import Callable

from qserve.server.job import Job, chat_job, completion_job
from qserve.server.pooling_job import embedding_job, pooling_job, rerank_job, score_job
from qserve.server.responses_job import responses_job
from qserve.server.served_model import ServedModel
from qserve.server.token_job import detokenize_job, tokenize_job

# by the name of the route; each raises ApiError and InputError
JOBS: dict[str, Callable[[ServedModel, bytes | bytearray, float], Job]] = {
    "completions": completion_job,
    "chat": chat_job,
    "responses": responses_job,
    "embeddings": embedding_job,
    "pooling": pooling_job,
    "score": score_job,
    "rerank": rerank_job,
    "tokenize": tokenize_job,
    "detokenize": detokenize_job,
}
