"""Pooled: partial results of pooling one prompt, and the final vectors."""

from dataclasses import dataclass, field

import numpy as np

from qserve.pooling.params import ALL, KINDS_OF_LOGITS, MEAN, PoolingParams


@dataclass(slots=True, kw_only=True)
class Pooled:
    """Partial results of pooling one request's prompt."""

    params: PoolingParams
    num_rows: int = 0  # prompt rows that are read or in flight
    parts: list[np.ndarray] = field(default_factory=list)  # float32; one sum, or rows, or logits

    def take(self, vectors_NC: np.ndarray) -> None:
        """Add the rows of a step, or their sum.

        For the kind ALL the rows are stored, otherwise they are added one by one, in order. The
        stored values are copies, so that the step's array, with rows of other requests, can be
        freed.
        """
        if self.params.kind == ALL:
            self.parts.append(vectors_NC.copy())
            return
        total, rest = (
            (self.parts[0], vectors_NC) if self.parts else (vectors_NC[0].copy(), vectors_NC[1:])
        )
        for vector in rest:  # numpy.sum would add in another order
            total += vector
        self.parts = [total]

    def result(self, num_prompt_tokens: int) -> bytes:
        """Return the final vector, or all vectors, as little-endian float32."""
        params = self.params
        if params.kind in KINDS_OF_LOGITS:
            return self.parts[0].astype("<f4").tobytes()
        if params.kind == ALL:
            found = np.concatenate(self.parts)
        else:
            (found,) = self.parts
            if params.kind == MEAN:
                found = found / np.float32(num_prompt_tokens)
        return finish(found, params).astype("<f4").tobytes()


def finish(vectors: np.ndarray, params: PoolingParams) -> np.ndarray:
    """Truncate and then normalize vectors [..., C]. Zero vectors stay zero."""
    vectors = vectors[..., : params.dimensions]
    if params.normalize:
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors = vectors / np.maximum(lengths, np.float32(1e-12))
    return vectors
