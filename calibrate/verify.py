"""Prove a written checkpoint: read it back and compare it with what was solved and with its source.

Knows the GPTQ folder that pipeline.py stages; trusts nothing but the files.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calibrate.layer_map import find_layer_map
from formats import gptq
from formats.checkpoint import CheckpointReader, read_json
from formats.errors import CheckpointError
from formats.packed import PackedWeight
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import QuantSpec

QUANTIZE_CONFIG = "quantize_config.json"
REMEDY = "nothing was published; check the disk, and run again"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDigest:
    """SHA-256 of what a solver produced for one linear."""

    spec: QuantSpec
    codes: str
    scales: str
    zeros: str

    @classmethod
    def of(cls, packed: PackedWeight) -> "LinearDigest":
        return cls(
            spec=packed.spec,
            codes=_sha256(packed.codes()),
            scales=_sha256(packed.scales_NG),
            zeros=_sha256(packed.zeros_NG),
        )


def verify(
    folder: str | Path,
    expected: Mapping[str, LinearDigest],
    source: CheckpointReader,
    rewritten: Mapping[str, str] | None = None,
    source_config: dict[str, Any] | None = None,
) -> None:
    """Raise CheckpointError, naming the tensor, unless `folder` holds exactly what it must.

    That is: every linear of `expected` with these codes, scales and zeros; what a transform has
    `rewritten` with its digest; every other tensor of `source` bit for bit, but for a tied head;
    nothing else; a configuration that reads back the same, beside `source_config` (None: the
    source's).
    """
    rewritten = rewritten or {}
    written = CheckpointReader(folder)
    config = _verify_config(written, source_config or source.config)
    kept = list(dict.fromkeys([*kept_tensors(source, expected), *rewritten]))
    names = {f"{name}.{field}" for name in expected for field in gptq.TENSOR_NAMES}
    for name in sorted(names.union(kept) - written.entries.keys()):
        raise CheckpointError(name, "is missing from the written checkpoint", REMEDY)
    for name in sorted(written.entries.keys() - names.union(kept)):
        raise CheckpointError(name, "is in the written checkpoint, but nothing wrote it", REMEDY)
    for name, digest in expected.items():
        tensors = {field: written.get(f"{name}.{field}") for field in gptq.TENSOR_NAMES}
        found = LinearDigest.of(gptq.decode(tensors, config.scheme.weight, name))
        for field in ("codes", "scales", "zeros", "spec"):
            if getattr(found, field) != getattr(digest, field):
                raise CheckpointError(name, f"its {field} differ from what was solved", REMEDY)
    for name in kept:
        tensor = written.get(name)
        if name in rewritten:
            if tensor_digest(tensor) != rewritten[name]:
                raise CheckpointError(name, "differs from what the recipe made of it", REMEDY)
        elif not _same_bits(tensor, source.get(name)):
            raise CheckpointError(
                name, "differs from the source, though it is not quantized", REMEDY
            )


def kept_tensors(source: CheckpointReader, linears: Mapping[str, object]) -> list[str]:
    """Names of the source's tensors that are written as they are, in the source's order."""
    tied_head = find_layer_map(source.config).tied_head(source.config)
    return [
        name
        for name in source.entries
        if name != tied_head and name.removesuffix(".weight") not in linears
    ]


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of dtype, shape and bytes."""
    return hashlib.sha256(
        f"{tensor.dtype} {list(tensor.shape)} {_sha256(tensor)}".encode()
    ).hexdigest()


def _verify_config(written: CheckpointReader, source_config: dict[str, Any]) -> QuantConfig:
    block = written.config.get(BLOCK)
    if {**source_config, BLOCK: block} != written.config:
        raise CheckpointError(
            "config.json", f"differs from the source in more than {BLOCK}", REMEDY
        )
    config = QuantConfig.from_dict(block)
    if config.to_dict() != block:
        raise CheckpointError("config.json", f"{BLOCK} does not read back the same", REMEDY)
    if read_json(written.folder / QUANTIZE_CONFIG) != block:
        raise CheckpointError(QUANTIZE_CONFIG, f"differs from config.json's {BLOCK}", REMEDY)
    return config


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy()).hexdigest()


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: NaN equals itself, 0 differs from -0."""
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(_bytes(left), _bytes(right))
