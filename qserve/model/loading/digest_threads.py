"""DigestThreads: computes digests of weights in threads, while the next weights are read.

SHA-256 and copies from a GPU release the interpreter lock.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from formats.in_memory.weights import Weight
from formats.weight_digest import tensor_digest, weight_digest

NUM_THREADS = 8
MAX_WAITING = 2 * NUM_THREADS  # maximum number of tensors that are kept alive


class DigestThreads:
    """Computes digests by name. A tensor's contents must not change until the next `wait`."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="digests")
        self._found: dict[str, Future[str]] = {}
        self._waiting: list[Future[str]] = []

    def tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Start the digest of a float tensor."""
        self._begin(name, tensor_digest, tensor)

    def weight(self, name: str, weight: Weight) -> None:
        """Start the digest of a quantized weight."""
        self._begin(name, weight_digest, weight)

    def _begin(self, name: str, digest: Callable[[Any], str], value: object) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.pop(0).result()
        self._found[name] = self._threads.submit(_computed, digest, value)
        self._waiting.append(self._found[name])

    def wait(self) -> None:
        """Wait until all started digests are done."""
        while self._waiting:
            self._waiting.pop().result()

    def result(self) -> dict[str, str]:
        """Wait, end the threads, and return the digests."""
        self._threads.shutdown()
        return {name: done.result() for name, done in self._found.items()}


def _computed(digest: Callable[[Any], str], value: object) -> str:
    with torch.inference_mode():  # the tensors were created in inference mode too
        return digest(value)
