"""Llama, Mistral, Ministral, Qwen2, Phi-3, SmolLM3, Seed-OSS, StarCoder 2, Nemotron, Gemma,
StableLM, Arcee, ERNIE 4.5, GLM, OPT, EXAONE 3, InternLM2, Baichuan and Qwen 1.

The family's row has the differences: names, biases, windows, layers without rotary embedding, tied
embeddings, matrices that are merged on disk, norm types, activations, ungated MLPs, ALiBi.

Other families use these functions too; their modules describe only differences from Llama.
"""

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import torch

from formats.in_memory.slices import Rows
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import Norm
from qserve.model.decoder import Decoder
from qserve.model.loading.layer_weights import LayerWeights
from qserve.model.loading.weights import Weights
from qserve.model.model_config import ModelConfig


def build(config: ModelConfig, weights: Weights) -> Decoder:
    return build_decoder(config, weights, build_layer)


def build_layer(config: ModelConfig, weights: LayerWeights, **attention: Any) -> Layer:
    """Build a layer. `attention`: additional arguments of build_attention."""
    first, second, *_ = (norm.name for norm in config.family.norms)  # the others are heads'
    return Layer(
        attention_norm=build_norm(config, weights, first),
        attention=build_attention(config, weights, **attention),
        mlp_norm=build_norm(config, weights, second),
        mlp=build_mlp(config, weights),
    )


def build_norm(config: ModelConfig, weights: LayerWeights, name: str) -> Norm:
    family = config.family
    return Norm(weights.norm(name), config.norm_eps, family.norm_kind, weights.norm_bias(name))


def build_attention(
    config: ModelConfig,
    weights: LayerWeights,
    block: type[Attention] = Attention,
    **different: Any,
) -> Attention:
    """Build attention of the class `block`. `different`: additional arguments of the class."""
    orders = None
    if config.family.qkv.by_head:
        orders = {config.family.qkv.name: weights.tp_plan.rows_by_head()}
    elif config.family.qkv.blocks:
        orders = {config.family.qkv.name: weights.tp_plan.rows_in_blocks()}
    elif config.family.gated_attention and len(config.family.qkv.members) == 3:
        # On disk rows are grouped by head: queries, gate. The block needs all queries first.
        (name, _), *_ = config.family.qkv.members
        heads = range(*weights.tp_plan.own_heads)
        orders = {name: parts_together((config.head_dim, config.head_dim), heads)}
    return block(
        config,
        window=config.windows[weights.number],
        rotary=weights.rotary,
        qkv_proj=weights.linear(config.family.qkv, orders=orders),
        o_proj=weights.linear(config.family.o),
        kernel=weights.kernels.get("attention"),
        norms_over_ranks=weights.norms_over_ranks(),
        is_gated=config.family.gated_attention,
        **weights.kv_scales(),
        **weights.alibi_slopes(),
        **different,
    )


def parts_together(sizes: tuple[int, ...], heads: Iterable[int]) -> Rows:
    """Return an order of rows that groups them by part instead of by head.

    On disk each head has parts of these sizes. The result lists the first part of all `heads`, then
    the second part, and so on.
    """
    width, starts = sum(sizes), [sum(sizes[:part]) for part in range(len(sizes))]
    return [
        (head * width + start, head * width + start + size)
        for start, size in zip(starts, sizes, strict=True)
        for head in heads
    ]


def build_mlp(config: ModelConfig, weights: LayerWeights) -> Mlp:
    family = config.family
    return Mlp(
        up_proj=weights.linear(family.gate_up, down=family.down),
        down_proj=weights.linear(family.down),
        gated=family.gated,
        **config.mlp_activation(weights.number),
    )


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    build_layer: Callable[[ModelConfig, LayerWeights], Layer],
) -> Decoder:
    family, values = config.family, config.values
    embedding = norm = head = layer_inputs = None
    if weights.has_ends:
        table = weights.embedding()
        factor = family.embedding_factor(values)
        embedding = Embedding(
            table, factor, weights.vocabulary, weights.positions(), weights.embedding_norm()
        )
        layer_inputs = weights.layer_inputs()
    with closing(weights.layers()) as each:  # closes the progress bar if a layer raises an error
        layers = [weights.finished(build_layer(config, layer)) for layer in each]
    if weights.has_ends:
        head = weights.head(table)
        norm = weights.last_norm()
    return Decoder(
        config,
        embedding=embedding,
        layers=layers,
        head=head,
        norm=norm,
        layer_inputs=layer_inputs,
        pipeline=weights.pipeline,
        like=torch.empty(0, dtype=weights.dtype, device=weights.device),
        logits_divisor=values.get(family.logits_divisor_key, 1.0),
        logits_factor=values.get(family.logits_factor_key, 1.0),
        logits_cap=values.get(family.logits_cap_key),
    )
