"""Queries, keys and values of MiMo-V2.5: its files fuse them in shards, the reader separates them.

A file has one matrix for each layer. It consists of shards, one for each KV head of layers without
a window: the queries, keys and values of a shard's heads follow each other. In float8 each shard
has its own blocks, and its last block may be cut. Blocks of keys and values then begin inside of
blocks of the shard, so float8 is presented as the floats that it means.

Legend: N rows, K columns, n rows of a shard.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from formats.architecture.family import Family
from formats.architecture.sizes import is_size, size
from formats.codecs.config_fields import BLOCK
from formats.errors import COPY_CONFIG, CheckpointError
from formats.files.tensor_entry import ComputedEntry, TensorEntry

LAYOUT, FUSED, APART = "attention_projection_layout", "fused_qkv", "split"
FAMILY = "mimo_v2_flash"
_QKV = "self_attn.qkv_proj"
_SCALES = "_scale_inv"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedRows(ComputedEntry):
    """Some rows of each shard of a fused matrix. `offset`: not used."""

    fused: TensorEntry
    scales: TensorEntry | None  # of blocks of float8; None: floats
    shards: int
    first: int  # row of a shard
    block: tuple[int, int]

    def read(self) -> torch.Tensor:
        """Read all rows. Raises CheckpointError."""
        return rows_of_shards(self.fused, self.scales, self)


def rows_of_shards(fused: Any, scales: Any, part: Any) -> torch.Tensor:
    """Return the rows of a part [N, K] from entries of the fused matrix and of its scales."""
    height, count = fused.shape[0] // part.shards, part.shape[0] // part.shards
    found = [
        fused.rows(shard * height + part.first, shard * height + part.first + count)
        for shard in range(part.shards)
    ]
    if scales is None:
        return torch.cat(found)
    rows, columns = part.block
    per_shard, scales_SK = -(-height // rows), scales.read().float()
    own_n = (part.first + torch.arange(count)) // rows
    made = []
    for shard, codes_nK in enumerate(found):
        of_rows = scales_SK[shard * per_shard + own_n].repeat_interleave(columns, 1)
        made.append(codes_nK.float() * of_rows[:, : codes_nK.shape[1]])
    return torch.cat(made).to(part.dtype)


def with_separate_qkv(
    config: Mapping[str, Any], family: Family, entries: dict[str, TensorEntry]
) -> dict[str, TensorEntry]:
    """Return the tensors with separate queries, keys and values. Raises CheckpointError."""
    if family.model_type != FAMILY:
        return entries
    layer = re.escape(family.layer).replace(re.escape("{i}"), r"(\d{1,9})")
    pattern, found = re.compile(rf"{layer}\.{re.escape(_QKV)}\.weight"), {}
    matches = {name: match for name in entries if (match := pattern.fullmatch(name))}
    for name, entry in entries.items():
        if name in matches:
            scales = entries.get(f"{name}{_SCALES}")
            found |= _apart(config, family, int(matches[name][1]), entry, scales)
        elif name.removesuffix(_SCALES) not in matches:
            found[name] = entry
    return found


def _apart(
    config: Mapping[str, Any], family: Family, layer: int, fused: Any, scales: Any
) -> dict[str, TensorEntry]:
    """Return separate entries of one layer's queries, keys and values."""
    sizes = family.sizes(config)
    linears = family.of_layer(layer, config).qkv.linears
    counts = [size(linear.outputs, sizes) for linear in linears]
    shards, block = sizes["num_key_value_heads"], _block_of(config)
    is_known = shards and None not in counts and not any(count % shards for count in counts)
    if not is_known or fused.shape != (sum(counts), sizes["hidden_size"]):
        raise CheckpointError(
            fused.name,
            f"expected {shards} shards with the rows of {counts} queries, keys and values, found"
            f" {list(fused.shape)}",
            COPY_CONFIG,
        )
    is_coded = fused.dtype == torch.float8_e4m3fn
    height = fused.shape[0] // shards
    if is_coded and (scales is None or scales.shape[0] != shards * -(-height // block[0])):
        stated = None if scales is None else list(scales.shape)
        raise CheckpointError(
            f"{fused.name}{_SCALES}",
            f"expected a scale for each block of {block[0]} rows of {shards} shards, found"
            f" {stated}",
            "download it again",
        )
    dtype, found = torch.bfloat16 if is_coded else fused.dtype, {}
    for linear, count, before in zip(linears, counts, accumulate([0, *counts[:-1]]), strict=True):
        name = f"{family.layer.format(i=layer)}.{linear.name}.weight"
        shape = (count, fused.shape[1])
        values = {
            **{"name": name, "dtype": dtype, "shape": shape, "shards": shards},
            **{"num_bytes": count * shape[1] * dtype.itemsize, "first": before // shards},
            **{"fused": fused, "scales": scales if is_coded else None, "block": block},
        }
        if isinstance(fused, TensorEntry):
            found[name] = ShardedRows(**values, file=fused.file, offset=fused.offset)
        else:  # a tensor in memory (MemoryTensors)
            found[name] = fused.of_shards(**values)
    return found


def _block_of(config: Mapping[str, Any]) -> tuple[int, int]:
    stated = config.get(BLOCK)
    block = stated.get("weight_block_size") if isinstance(stated, Mapping) else None
    is_known = isinstance(block, list) and len(block) == 2 and all(map(is_size, block))
    return tuple(block) if is_known else (128, 128)


def separate_qkv_keys(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the keys of a config with separate queries, keys and values in float."""
    if config.get(LAYOUT) != FUSED:
        return {}
    found: dict[str, Any] = {LAYOUT: APART}
    block = config.get(BLOCK)
    if isinstance(block, Mapping) and block.get("quant_method") == "fp8":
        key = "modules_to_not_convert" if block.get("modules_to_not_convert") else "ignored_layers"
        names = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(num_layers) for x in "qkv"]
        found[BLOCK] = {**block, key: [*(block.get(key) or ()), *names]}
    return found
