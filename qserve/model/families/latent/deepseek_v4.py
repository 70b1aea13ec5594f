"""DeepSeek-V4: compressed attention, hyper-connections, and experts in every layer.

config.json has the type of each layer's attention (`layer_types`), and whether its experts are
chosen by scores or by a table of tokens (`mlp_layer_types`). The MTP layer is not read.
"""

from collections.abc import Mapping

import torch

from formats.architecture.rows import deepseek_v4 as row
from qserve.model.blocks.compressed.attention import CompressedAttention, EntryIndexer
from qserve.model.blocks.compressed.compressor import Compressor
from qserve.model.blocks.compressed.hyper import (
    HyperConnection,
    HyperLayer,
    HyperStreams,
    HyperWeights,
)
from qserve.model.blocks.compressed.step_rows import RowsOfStep
from qserve.model.decoder import Decoder
from qserve.model.families import llama, moe
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    rows_of_step, values = RowsOfStep(), config.values

    def build_one(config: ModelConfig, layer: LayerWeights) -> HyperLayer:
        return build_layer(config, layer, rows_of_step)

    decoder = llama.build_decoder(config, weights, build_one)
    merging = HyperWeights(**weights.merge_tensors())
    decoder.streams = HyperStreams(merging, norm_eps=config.norm_eps, eps=values["hc_eps"])
    decoder.reads_tokens = True
    decoder.no_graphs = "plain torch finds the windows that end in a step"
    return decoder


def build_layer(config: ModelConfig, weights: LayerWeights, rows_of_step: RowsOfStep) -> HyperLayer:
    values, learned = config.values, weights.activation_tensors()

    def hyper(block: str) -> HyperConnection:
        found = {leaf: learned[f"hc_{block}_{leaf}"] for leaf in HyperWeights._fields}
        return HyperConnection(
            HyperWeights(**found),
            norm_eps=config.norm_eps,
            eps=values["hc_eps"],
            iterations=values["hc_sinkhorn_iters"],
        )

    return HyperLayer(
        attention_hyper=hyper("attn"),
        mlp_hyper=hyper("ffn"),
        attention_norm=llama.build_norm(config, weights, "attn_norm"),
        attention=build_attention(config, weights, learned, rows_of_step),
        mlp_norm=llama.build_norm(config, weights, "ffn_norm"),
        mlp=moe.build_mlp(config, weights),
    )


def build_attention(
    config: ModelConfig,
    weights: LayerWeights,
    learned: Mapping[str, torch.Tensor],
    rows_of_step: RowsOfStep,
) -> CompressedAttention:
    """Build the attention of a layer. Every rank computes all heads."""
    family, values = config.family, config.values
    kind, compressor, indexer = values["layer_types"][weights.number], None, None
    if kind != row.SLIDING:
        compressor = build_compressor(config, weights, row.COMPRESSOR)
    if kind == row.SPARSE:
        indexer = EntryIndexer(
            compressor=build_compressor(config, weights, row.INDEX_COMPRESSOR),
            wq_b=weights.float_linear(weights.kind_tensor(f"{row.INDEXER}.wq_b.weight")),
            weights_proj=weights.float_linear(
                weights.kind_tensor(f"{row.INDEXER}.weights_proj.weight")
            ),
            rotary=weights.rotary,
            most=values["index_topk"],
        )
    return CompressedAttention(
        heads=values["num_attention_heads"],
        window=values["sliding_window"],
        eps=config.norm_eps,
        rotary=weights.rotary,
        qkv_proj=weights.linear(family.qkv),
        q_b_proj=weights.linear(family.query_up),
        o_a=weights.constant(learned["wo_a"]).unflatten(0, (values["o_groups"], -1)),
        o_b_proj=weights.linear(family.o),
        q_norm=weights.norm(row.QUERY_NORM),
        kv_norm=weights.norm(row.KEY_NORM),
        sinks=learned["sinks"],
        rows_of_step=rows_of_step,
        compressor=compressor,
        indexer=indexer,
    )


def build_compressor(config: ModelConfig, weights: LayerWeights, module: str) -> Compressor:
    parts = [weights.kind_tensor(f"{module}.{name}.weight") for name in ("wkv", "wgate")]
    return Compressor(
        projection=weights.float_linear(torch.cat(parts)),
        ape=weights.kind_tensor(f"{module}.ape", torch.float32),
        norm=weights.kind_tensor(f"{module}.norm.weight", torch.float32),
        eps=config.norm_eps,
        rotary=weights.rotary,
    )
