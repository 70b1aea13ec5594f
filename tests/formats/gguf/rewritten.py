"""A GGUF file of float tensors, read and written again with some of it changed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from formats.gguf.container import read_gguf
from tests.formats.gguf.written import F32, write_gguf

Tensors = dict[str, torch.Tensor]


def rewrite(
    source: Path,
    target: Path,
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[Tensors], Any] = lambda tensors: None,
) -> Path:
    """Write `source` as F32, with other metadata and tensors that `change` edits.

    None in `metadata`: the key is left out.
    """
    gguf, data = read_gguf(source), source.read_bytes()
    stated = {
        key: value if isinstance(value, str | bool | int | float) else list(value)
        for key, value in gguf.metadata.items()
    } | dict(metadata or {})
    tensors = {
        name: torch.frombuffer(
            bytearray(data[each.offset : each.offset + each.num_bytes]), dtype=torch.float32
        ).reshape(each.shape)
        for name, each in gguf.tensors.items()
    }
    change(tensors)
    return write_gguf(
        target,
        {key: value for key, value in stated.items() if value is not None},
        {name: (tensor, F32) for name, tensor in tensors.items()},
    )
