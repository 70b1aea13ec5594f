"""Verify a written checkpoint: read it back and compare it with the solved weights and the source.

The checkpoint is the staged folder of pipeline.py. Everything is read from its files.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from calibrate.digest import tensor_digest
from calibrate.layer_map import find_layer_map
from formats.checkpoint import CheckpointReader, TensorEntry, read_json
from formats.errors import CheckpointError
from formats.in_memory.weights import Weight, tensors_of
from formats.layouts import decode_linear, layout_of
from formats.quant_config import BLOCK, WRITTEN, QuantConfig
from formats.scheme import Scheme

INPUT_SCALE = "input_global_scale"  # of inputs that other programs round
REMEDY = "nothing was published; check the disk, and run the same command again"


class Source(Protocol):
    """The float model: a CheckpointReader, or a FloatModel that pads its tensors."""

    config: dict[str, Any]
    entries: dict[str, TensorEntry]

    def get(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDigest:
    """SHA-256 of a solver's result for one linear."""

    scheme: Scheme
    hashes: dict[str, str]  # by part: codes, scales, zeros, input scale, if present
    fields: tuple[str, ...]  # local names of the tensors that the file must have

    @classmethod
    def of(cls, weight: Weight, encoded: Mapping[str, torch.Tensor]) -> "LinearDigest":
        tensors = tensors_of(weight)
        if INPUT_SCALE in encoded:  # it is not read back into the weight
            tensors[INPUT_SCALE] = encoded[INPUT_SCALE]
            tensors.pop("input_scale", None)
        hashes = {name: _sha256(tensor) for name, tensor in tensors.items()}
        return cls(scheme=weight.scheme, hashes=hashes, fields=tuple(encoded))


def verify(
    folder: str | Path,
    expected: Mapping[str, LinearDigest],
    source: Source,
    rewritten: Mapping[str, str] | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """Raise CheckpointError, naming the tensor, unless `folder` has exactly the expected contents.

    - Linears in `expected` have their codes, scales and zeros.
    - Tensors in `rewritten` (changed by a transform) have their digests.
    - All other tensors of `source`, except a tied head, are the same bit for bit.
    - There is no other tensor.
    - The quantization config reads back the same, and the rest of config.json equals `config`
      (None: the source's).
    """
    rewritten = rewritten or {}
    written = CheckpointReader(folder)
    quant_config = _verify_config(written, config or source.config)
    kept = list(dict.fromkeys([*kept_tensors(source, expected), *rewritten]))
    names = {f"{name}.{field}" for name in expected for field in expected[name].fields}
    for name in sorted(names.union(kept) - written.entries.keys()):
        raise CheckpointError(name, "is missing from the written checkpoint", REMEDY)
    for name in sorted(written.entries.keys() - names.union(kept)):
        raise CheckpointError(name, "is in the written checkpoint, but should not be", REMEDY)
    regrouped = False
    for name, digest in expected.items():
        tensors = {field: written.get(f"{name}.{field}") for field in digest.fields}
        weight = decode_linear(name, tensors, quant_config)
        regrouped |= weight.input_order is not None
        found = LinearDigest.of(weight, tensors)
        for part in {**digest.hashes, **found.hashes}:
            if found.hashes.get(part) != digest.hashes.get(part):
                raise CheckpointError(name, f"its {part} differ from the solver's result", REMEDY)
        if found.scheme != WRITTEN[quant_config.method].stored(digest.scheme):
            raise CheckpointError(
                name, f"reads back as {found.scheme}, not as {digest.scheme}", REMEDY
            )
    if quant_config.act_order != regrouped:
        raise CheckpointError(
            f"{BLOCK} in config.json",
            f"states act-order {str(quant_config.act_order).lower()}, but the tensors have"
            f" {'a' if regrouped else 'no'} group index",
            REMEDY,
        )
    for name in kept:
        tensor = written.get(name)
        if name in rewritten:
            if tensor_digest(tensor) != rewritten[name]:
                raise CheckpointError(name, "differs from the recipe's result", REMEDY)
        elif not _same_bits(tensor, source.get(name)):
            raise CheckpointError(
                name, "differs from the source, although it is not quantized", REMEDY
            )


def kept_tensors(source: Source, linears: Mapping[str, object]) -> list[str]:
    """Return the names of tensors that are not quantized, in the source's order."""
    tied_head = find_layer_map(source.config).tied_head(source.config)
    return [
        name
        for name in source.entries
        if name != tied_head and name.removesuffix(".weight") not in linears
    ]


def _verify_config(written: CheckpointReader, expected: dict[str, Any]) -> QuantConfig:
    block = written.config.get(BLOCK)
    if {**expected, BLOCK: block} != written.config:
        raise CheckpointError(
            "config.json", f"differs from the source in more than {BLOCK}", REMEDY
        )
    config = QuantConfig.from_dict(block)
    # In a vision-language model the block also names modules of the vision tower.
    if not written.other_parts and config.to_dict() != block:
        raise CheckpointError("config.json", f"{BLOCK} does not read back the same", REMEDY)
    second = layout_of(config).second_file
    if second is not None and read_json(written.folder / second) != written.whole_config[BLOCK]:
        raise CheckpointError(second, f"differs from config.json's {BLOCK}", REMEDY)
    return config


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8)


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(tensor).numpy()).hexdigest()


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True for equal dtype, shape and bytes. NaN equals itself; 0 differs from -0."""
    same_kind = left.dtype == right.dtype and left.shape == right.shape
    return same_kind and torch.equal(_bytes(left), _bytes(right))
