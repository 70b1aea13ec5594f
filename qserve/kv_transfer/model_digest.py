"""A digest of everything that the bytes of a KV page depend on, except its tokens.

Engines with equal digests may exchange pages: they have byte-identical weights, the same rotary
embeddings and the same page format. Kernels are not covered; they may differ and round differently.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from formats.checkpoint import CheckpointReader
from qserve.model.loading.online_quantization import RoundingPlan
from qserve.model.model_config import ModelConfig
from qserve.model.rope import inverse_frequencies

FORM = "1"  # version of the page format, which is the order of tensors in page_copies.py
READ_BYTES = 2**23
MAX_FILES_AT_ONCE = 8


def page_digest(
    folder: str, model: ModelConfig, *, max_model_len: int, dummy_seed: int | None, form: str
) -> str:
    """Return the digest of a model and its page format.

    `form`: describes the page format. `dummy_seed`: seed of random weights; None: real weights.
    Reads all weights, at 1 to 2 GB/s per file, several files in parallel.
    """
    digest = hashlib.sha256()
    for part in (
        FORM,
        form,
        json.dumps(_of_the_model(model.values), sort_keys=True, default=str),
        *(_rope_text(rope, max_model_len) for rope in model.ropes),
        f"dummy {dummy_seed}" if dummy_seed is not None else "",
        f"{model.quant!r}",  # covers the rounding of activations, which weight files do not show
        *(() if dummy_seed is not None else _weight_digests(folder)),
        *(() if model.rounding is None else _schemes(model.rounding)),
    ):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _of_the_model(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without keys that record the folder's path and the writing program."""
    return {k: v for k, v in values.items() if k[:1] != "_" and k != "transformers_version"}


def _rope_text(rope: object, max_model_len: int) -> str:
    """Return the RoPE frequencies as text. For some types they depend on the maximum length."""
    if rope is None:
        return "none"
    frequencies, scale = inverse_frequencies(rope, max_model_len)
    return f"{scale!r} {rope.interleaved} {frequencies.tolist()!r}"


def _schemes(rounding: RoundingPlan) -> Iterable[str]:
    """Yield the schemes of the linears that are rounded while they load."""
    return (f"{name} {scheme}" for name, scheme in sorted(rounding.schemes.items()))


def _weight_digests(folder: str) -> Iterable[str]:
    """Yield the digest of each file with tensors of the model, in the order of file names."""
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
