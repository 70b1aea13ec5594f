"""A quantized checkpoint as floats: each linear is decoded when it is read.

So a model that is published only in 8 bits, such as DeepSeek-V3, can be quantized again, and any
checkpoint can be written as floats (`qserve convert --format float`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from formats.architecture.float_linears import linear_shapes
from formats.architecture.sizes import size
from formats.codecs import mxfp4
from formats.codecs.kv_cache import KV_SCALE_NAMES
from formats.errors import COPY_BLOCK, CheckpointError
from formats.families import family_of
from formats.files.tensor_entry import ComputedEntry, TensorEntry
from formats.layouts import (
    decode_dense,
    layout_of,
    quantized_modules,
    tensor_names,
    why_no_scheme,
)
from formats.quant_config import BLOCK, QuantConfig, find_block
from formats.scheme import Scheme

MXFP4 = Scheme.parse("w4a16-mxfp4")
DEFAULT_DTYPE = torch.bfloat16  # if config.json states none


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedEntry(ComputedEntry):
    """A tensor of floats that is decoded when it is read. `num_bytes` is its size in the file."""

    tensors: Mapping[str, TensorEntry]  # by the names that the decoder expects
    scheme: Scheme
    config: QuantConfig | None  # None: a stack of experts in gpt-oss's MXFP4

    @property
    def stored_as(self) -> str:
        """Dtype of the largest stored tensor."""
        return max(self.tensors.values(), key=lambda entry: entry.num_bytes).stored_as

    def read(self) -> torch.Tensor:
        """Read and decode the tensor. Raises CheckpointError."""
        tensors = {name: entry.read() for name, entry in self.tensors.items()}
        if self.config is None:
            decoded = _stack(tensors, self.name)
        else:
            decoded = decode_dense(
                self.name.removesuffix(".weight"), tensors, self.config
            ).weight_NK
        return self._rounded(decoded)

    def _rounded(self, decoded: torch.Tensor) -> torch.Tensor:
        if tuple(decoded.shape) != self.shape:
            raise CheckpointError(
                self.name,
                f"config.json states {list(self.shape)}, found codes of {list(decoded.shape)}",
                "copy config.json from the original checkpoint",
            )
        return rounded(self.name, decoded, self.dtype)


def rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype. Raises CheckpointError if a number exceeds float16."""
    found = tensor.to(dtype)
    if dtype == torch.float16 and bool((found.isinf() & tensor.isfinite()).any()):
        raise CheckpointError(name, "exceeds the range of float16", "use bfloat16")
    return found


def float_view(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> tuple[dict[str, Any], dict[str, TensorEntry], dict[str, Scheme]]:
    """Return config.json without quantization, float tensors, and the schemes of decoded linears.

    A float checkpoint is returned as it is. Scales of an 8-bit KV cache are left out. Raises
    CheckpointError for a quantized linear that the configuration leaves in float.
    """
    dtype = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))), DEFAULT_DTYPE)
    instead, block = _stacks(entries, dtype), find_block(folder, config)
    if block is not None:
        instead |= _linears(entries, QuantConfig.from_dict(block), _shapes(config), dtype)
    elif not instead:
        return dict(config), dict(entries), {}
    kv_scales = tuple(f".{name}" for names in KV_SCALE_NAMES.values() for name in names)
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        if name in instead:
            found[instead[name].name] = instead[name]
        elif not name.endswith(kv_scales):
            found[name] = entry
    schemes = {each.name.removesuffix(".weight"): each.scheme for each in instead.values()}
    return without_block(config), found, schemes


def _linears(
    entries: Mapping[str, TensorEntry],
    quant: QuantConfig,
    shapes: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
) -> dict[str, DecodedEntry]:
    """Return the weight of every quantized linear, by the names of its tensors."""
    found = {}
    for module in quantized_modules(entries):
        scheme = quant.scheme_for(module)
        if scheme is None:
            raise CheckpointError(module, why_no_scheme(module, quant), COPY_BLOCK)
        names = tensor_names(module, layout_of(quant), entries)
        stored, shape = {local: entries[full] for local, full in names.items()}, shapes.get(module)
        if shape is None:  # only decoding shows the shape: no row states it
            values = {local: entry.read() for local, entry in stored.items()}
            shape = tuple(decode_dense(module, values, quant).weight_NK.shape)
        weight = _entry(f"{module}.weight", stored, scheme, shape, dtype, quant)
        found |= dict.fromkeys(names.values(), weight)
    return found


def _stacks(entries: Mapping[str, TensorEntry], dtype: torch.dtype) -> dict[str, DecodedEntry]:
    """Return the stacks of experts [E, K, N] that gpt-oss stores as MXFP4 blocks [E, N, G, 16].

    The keys are the names of the blocks and scales.
    """
    found = {}
    for name, blocks in entries.items():
        stack = name.removesuffix("_blocks")
        if stack != name and f"{stack}_scales" in entries:
            E, N, G = blocks.shape[:3]
            stored = {"blocks": blocks, "scales": entries[f"{stack}_scales"]}
            weights = _entry(stack, stored, MXFP4, (E, G * mxfp4.GROUP, N), dtype, None)
            found |= {name: weights, f"{stack}_scales": weights}
    return found


def without_block(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json without quantization, also in the block of a text model."""
    return {
        key: without_block(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != BLOCK
    }


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return [N, K] of the linears, embedding and head that the family's row states, by module."""
    family = family_of(config)
    if family is None:
        return {}
    family = family.variant(config)
    sizes = {name: value for name, value in family.sizes(config).items() if value is not None}
    found = linear_shapes(family, config, sizes)
    for name, dims in family.model_tensors.items():
        shape = tuple(size(names, sizes) for names in dims)
        if len(shape) == 2 and None not in shape:
            found[name.removesuffix(".weight")] = shape
    return found


def _entry(
    name: str,
    tensors: Mapping[str, TensorEntry],
    scheme: Scheme,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    config: QuantConfig | None,
) -> DecodedEntry:
    first = next(iter(tensors.values()))
    return DecodedEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        file=first.file,
        offset=first.offset,
        tensors=tensors,
        scheme=scheme,
        config=config,
    )


def _stack(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Decode MXFP4 blocks of all experts [E, N, G, 16] to floats [E, K, N], as gpt-oss has them."""
    return torch.stack(
        [
            mxfp4.decode(blocks, scales, name).dequantize().T
            for blocks, scales in zip(tensors["blocks"], tensors["scales"], strict=True)
        ]
    )
