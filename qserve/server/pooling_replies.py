"""The JSON of replies with vectors and scores. Pure: objects in, dicts out."""

import base64
import time
from typing import Any

import numpy as np

from qserve import scoring
from qserve.pooling_params import ALL, LABELS
from qserve.server.generation import Output
from qserve.server.job import Job


def embeddings(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """The reply of /v1/embeddings."""
    data = [
        {"object": "embedding", "index": index, "embedding": _vector(job, output, prompt)}
        for index, (output, prompt) in enumerate(zip(outputs, job.prompts, strict=True))
    ]
    return _list(job, model, outputs, data)


def pooling(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """The reply of /pooling."""
    data = [
        {"object": "pooling", "index": index, "data": _vector(job, output, prompt)}
        for index, (output, prompt) in enumerate(zip(outputs, job.prompts, strict=True))
    ]
    return _list(job, model, outputs, data)


def scores(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """The reply of /score."""
    data = [
        {"object": "score", "index": index, "score": score}
        for index, score in enumerate(_scores(job, outputs))
    ]
    return _list(job, model, outputs, data)


def ranking(job: Job, model: str, outputs: list[Output]) -> dict[str, Any]:
    """The reply of /rerank: the best first, and of equals the first."""
    found = enumerate(_scores(job, outputs))
    best = sorted(found, key=lambda each: -each[1])[: job.repeated["top_n"]]
    documents = job.repeated["documents"]
    results = []
    for index, score in best:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if documents is not None:
            result["document"] = {"text": documents[index]}
        results.append(result)
    usage = _usage(job, outputs)
    return {"id": job.request_id, "model": model, "results": results, "usage": usage}


def _vector(job: Job, output: Output, prompt: list[int]) -> Any:
    if job.repeated["encoding_format"] == "base64":
        return base64.b64encode(output.pooled).decode()
    values = np.frombuffer(output.pooled, "<f4")
    kind = job.handling.pooling.kind
    if kind == ALL:
        values = values.reshape(len(prompt), -1)
    return scoring.probabilities(values) if kind == LABELS else values.tolist()


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
    num_cached = sum(output.num_cached for output in outputs)
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "total_tokens": job.num_prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
