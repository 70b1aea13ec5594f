"""Creates the absorbed float matrices of latent attention, and indexers.

H: heads of this rank. P: width of a query's part without RoPE. L: width of a latent. V: width
of a value.
"""

from collections.abc import Callable
from typing import Any

import torch

from formats.architecture.columns import BlockIndexer as BlockIndexerRow
from formats.architecture.columns import Indexer as IndexerRow
from formats.architecture.projection import Projection
from qserve.model.blocks.block_attention import BlockIndexer
from qserve.model.blocks.latent.attention import LatentShape
from qserve.model.blocks.latent.indexer import Indexer
from qserve.model.blocks.linear import FloatLinear, Linear
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.tp_plan import LinearPart


def absorbed(
    weights: Any, prefix: str, projection: Projection, shape: LatentShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return W_UK [H, P, L] and W_UV [H, L, V] of the layer with this prefix.

    `projection`: the linear from latents to keys and values. If it is quantized, it is dequantized
    here, because the product with W_UK reduces over its outputs, which kernels for packed weights
    do not support. `weights`: qserve.model.loading.weights.Weights.
    """
    (linear,) = projection.linears
    name, stored = f"{prefix}.{linear.name}", weights.shape(linear.shape)
    if weights.source.is_quantized(name):
        whole_NL = weights.source.weight(name, stored).dequantize()
    else:
        whole_NL = weights.source.tensor(f"{name}.weight", stored)
    rows = weights.tp_plan.head_rows(linear.outputs[0])
    if rows is not None:
        weights.parts[name] = LinearPart(rows=(rows,))
        whole_NL = whole_NL[slice(*rows)]
    by_head = whole_NL.to(weights.device, weights.dtype).unflatten(0, (shape.heads, -1))
    key_up, value_up = by_head.split([shape.nope, shape.value], dim=1)
    return key_up.contiguous(), value_up.transpose(1, 2).contiguous()


def indexer(weights: Any, prefix: str, row: IndexerRow, rotary: Rotary) -> Indexer:
    """Return the indexer of the layer with this prefix. It is replicated on all ranks.

    `weights`: qserve.model.loading.weights.Weights.
    """

    def linear(projection: Projection) -> Linear:
        (stored,) = projection.linears
        outputs, inputs = weights.shape(stored.shape)
        return weights.linear([f"{prefix}.{stored.name}"], [outputs], inputs)

    def tensor(name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = weights.shape(row.tensors[name])
        return weights.source.tensor(f"{prefix}.{name}", shape).to(weights.device, dtype)

    return Indexer(
        wq_b=linear(row.queries),
        wk=linear(row.keys),
        weights_proj=FloatLinear(tensor(f"{row.weights.name}.weight", torch.float32)),
        k_norm=(
            tensor(f"{row.norm}.weight", weights.dtype),
            tensor(f"{row.norm}.bias", weights.dtype),
        ),
        rotary=rotary,
        is_interleaved=row.interleaved,
        most=weights.config.values[row.count_key],
    )


def block_indexer(
    weights: Any,
    prefix: str,
    row: BlockIndexerRow,
    linear: Callable[[Projection], Linear],
    rotary: Rotary,
) -> BlockIndexer:
    """Return the indexer of blocks of the layer with this prefix. It is sharded by heads.

    `weights`: qserve.model.loading.weights.Weights. `linear`: returns the layer's linears.
    """
    values, shape = weights.config.values, weights.shape((("index_head_dim",),))
    q_norm, k_norm = (
        Norm(weights.norm(f"{prefix}.{name}.weight", shape), weights.config.norm_eps)
        for name in (row.query_norm, row.key_norm)
    )
    return BlockIndexer(
        q_proj=linear(row.queries),
        k_proj=linear(row.keys),
        q_norm=q_norm,
        k_norm=k_norm,
        rotary=rotary,
        block_size=values[row.block_size_key],
        most=values[row.count_key],
        local=values[row.local_key],
        dtype=weights.dtype,
    )
