"""What the bytes of a KV page depend on beside its tokens, as one digest. Knows no requests.

Engines whose digests are equal may exchange pages: the same weights, byte for byte, the same
positions, the same form of a page. Kernels may differ, and then round differently.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from formats.checkpoint import CheckpointReader
from qserve.model.model_config import ModelConfig
from qserve.model.rope import inverse_frequencies

FORM = "1"  # of a page: the order of its parts in page_copies.py
READ_BYTES = 2**23
MAX_FILES_AT_ONCE = 8


def page_digest(
    folder: str, model: ModelConfig, *, max_model_len: int, dummy_seed: int | None, form: str
) -> str:
    """`form`: of pages, as the engine holds them. `dummy_seed`: the weights are made up from it.

    Reads all weights: 1 to 2 GB/s for each file, several files at once.
    """
    digest = hashlib.sha256()
    for part in (
        FORM,
        form,
        json.dumps(_of_the_model(model.values), sort_keys=True, default=str),
        *(_rope_text(rope, max_model_len) for rope in model.ropes),
        f"dummy {dummy_seed}" if dummy_seed is not None else "",
        *(() if dummy_seed is not None else _weight_digests(folder)),
    ):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _of_the_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what says where a copy lies and which program wrote it."""
    return {k: v for k, v in values.items() if k[:1] != "_" and k != "transformers_version"}


def _rope_text(rope: object, max_model_len: int) -> str:
    """The frequencies: some kinds have others when sequences may be longer."""
    if rope is None:
        return "none"
    frequencies, scale = inverse_frequencies(rope, max_model_len)
    return f"{scale!r} {rope.interleaved} {frequencies.tolist()!r}"


def _weight_digests(folder: str) -> Iterable[str]:
    """Of each file that holds tensors of the model, in the order of their names."""
    files = sorted({entry.file for entry in CheckpointReader(folder).entries.values()})
    with ThreadPoolExecutor(MAX_FILES_AT_ONCE) as pool:
        yield from pool.map(_file_digest, files)


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(READ_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
