"""Builds replies with vectors, scores and labels, as dicts and arrays."""

import base64
import time
from typing import Any

import numpy as np

from qserve.pooling import scoring
from qserve.pooling.params import ALL, LABELS
from qserve.server.http.errors import ApiError
from qserve.server.openai.generation import Output
from qserve.server.requests.job import Job

# Limit of a decimal reply, where a number takes about 20 bytes. In base64 a number takes 5 bytes.
MAX_NUMBERS = 2**22


def embeddings(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of /v1/embeddings. Raises ApiError if it would be too large."""
    _check_size(job, outputs)
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(job, output, prompt)}
        for index, (output, prompt) in enumerate(zip(outputs, job.prompts, strict=True))
    ]
    return _list(job, model, outputs, data)


def pooling(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of /pooling. Raises ApiError if it would be too large."""
    _check_size(job, outputs)
    data = [
        {"object": "pooling", "index": index, "data": _vector(job, output, prompt)}
        for index, (output, prompt) in enumerate(zip(outputs, job.prompts, strict=True))
    ]
    return _list(job, model, outputs, data)


def classes(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of /classify, with vLLM's fields."""
    data, labels = [], job.repeated["labels"]
    for index, (output, prompt) in enumerate(zip(outputs, job.prompts, strict=True)):
        found = _vector(job, output, prompt)
        best = max(range(len(found)), key=found.__getitem__)
        label = labels[best] if best < len(labels) else f"LABEL_{best}"
        data.append({"index": index, "label": label, "probs": found, "num_classes": len(found)})
    return _list(job, model, outputs, data)


def embed(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of Cohere's /v2/embed."""
    vectors = [np.frombuffer(output.pooled, "<f4") for output in outputs]
    kinds = job.repeated["embedding_types"]
    found = {kind: [_EMBEDDINGS[kind](each) for each in vectors] for kind in kinds}
    return {
        "id": job.request_id,
        "embeddings": found,
        "texts": job.repeated["texts"],
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"input_tokens": job.num_prompt_tokens},
        },
        "response_type": "embeddings_by_type",
    }


def _signs(vector: np.ndarray) -> np.ndarray:
    """Pack the signs of a vector's numbers, eight per byte, the first in the highest bit."""
    return np.packbits(vector > 0)


# Cohere's embedding type -> conversion of a float32 vector
_EMBEDDINGS = {
    "float": lambda vector: vector.tolist(),
    "base64": lambda vector: base64.b64encode(vector.tobytes()).decode(),
    "ubinary": lambda vector: _signs(vector).tolist(),
    "binary": lambda vector: (_signs(vector).astype(int) - 128).tolist(),
}


def scores(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of /score."""
    data = [
        {"object": "score", "index": index, "score": score}
        for index, score in enumerate(_scores(job, outputs))
    ]
    return _list(job, model, outputs, data)


def ranking(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """Build the reply of /rerank: best document first; ties keep the order of the request."""
    found = enumerate(_scores(job, outputs))
    best = sorted(found, key=lambda each: -each[1])[: job.repeated["top_n"]]
    documents = job.repeated["documents"]
    results = []
    for index, score in best:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if documents is not None:
            result["document"] = documents[index]
        results.append(result)
    usage = _usage(job, outputs)
    return {"id": job.request_id, "model": model, "results": results, "usage": usage}


def _vector(job: Job, output: Output, prompt: list[int]) -> Any:
    if job.repeated["encoding_format"] == "base64":
        return base64.b64encode(output.pooled).decode()
    values = np.frombuffer(output.pooled, "<f4")
    kind = job.options.pooling.kind
    if kind == ALL:
        values = values.reshape(len(prompt), -1)
    return scoring.probabilities(values) if kind == LABELS else values


def _check_size(job: Job, outputs: list[Output]) -> None:
    count = sum(len(output.pooled) for output in outputs) // 4
    if job.repeated["encoding_format"] != "base64" and count > MAX_NUMBERS:
        raise ApiError(
            400,
            f"input: expected at most {MAX_NUMBERS} numbers in one response, found {count}.",
            'Send fewer or shorter texts, or set encoding_format to "base64".',
            "input",
        )


def _scores(job: Job, outputs: list[Output]) -> list[float]:
    values = [np.frombuffer(output.pooled, "<f4") for output in outputs]
    pairs = job.repeated.get("pairs")
    if pairs is None:
        return [scoring.of_logits(each) for each in values]
    return [scoring.of_vectors(values[first], values[second]) for first, second in pairs]


def _list(job: Job, model: str, outputs: list[Output], data: list[dict]) -> dict[str, Any]:
    return {
        "id": job.request_id,
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": data,
        "usage": _usage(job, outputs),
    }


def _usage(job: Job, outputs: list[Output]) -> dict[str, Any]:
    num_cached = sum(output.facts.num_cached for output in outputs)
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "total_tokens": job.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
