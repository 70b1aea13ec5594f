"""A wrong reading of a family's config or weights changes its logits: test_family_tokens.py would
see it."""

import pytest
import torch

from qkernels.rowwise.spec import ActSpec
from qserve.llm import LLM
from tests.qserve.model.variants import TOKENS, relative
from tests.qserve.model.wrong_readings import (
    by_scores_alone,
    every_layer,
    exchanged_inputs,
    exchanged_rotations,
    exchanged_slopes,
    exchanged_slopes_of_xielu,
    experts_read_dense_input,
    in_sequence,
    longer_chunk,
    moved_positions,
    moved_window,
    no_branch_factor,
    one_norm,
    open_gates,
    other_activation,
    other_rotation,
    other_streams,
    plain_embedding,
    plain_relu,
    router_of,
    router_reads_experts_input,
    scaled_outputs,
    set_attention,
    set_decoder,
    set_norms,
    set_routing,
    set_xielu,
    shared_layers,
    sum_of_branches_without_norms,
    swapped,
    swapped_norms,
    swish,
    turned_rotation,
    unnormalized,
    unscaled,
    unscaled_slopes,
    values_of_normed_keys,
    whole_rotation,
    without_biases,
    without_embedding_norm,
    without_head_bias,
    without_laurel,
    without_norms_after,
    without_offset,
    without_rotation,
    without_shared,
    without_sparsity,
)
from tests.tiny_families import TINY

WRONG = {
    "window one longer": ("ministral", moved_window(1)),
    "window one shorter": ("gemma3", moved_window(-1)),
    "window of a fused model": ("phi-3 mini 4k", moved_window(1)),
    "norms without their 1": ("gemma2", without_offset),
    "norms of heads without their 1": (
        "gemma3",
        every_layer(lambda layer: layer.attention.q_norm.sub_(1)),
    ),
    "norm behind attention taken for that before the feed-forward, Gemma": (
        "gemma2",
        swapped("attention_end.norm", "mlp_norm"),
    ),
    "norm behind attention taken for that before the feed-forward, GLM": (
        "glm4",
        swapped("attention_end.norm", "mlp_norm"),
    ),
    "norms behind taken for each other": ("olmo2", swapped("attention_end.norm", "mlp_end.norm")),
    "norms before and behind exchanged": ("olmo3", swapped("attention_norm", "attention_end.norm")),
    "norms of all heads taken for norms of each": ("olmo2", set_attention(q_norm=None)),
    "rotation of the other kind of layer, Gemma 3": ("gemma 3, scaled", exchanged_rotations),
    "rotation of the other kind of layer, OLMo 3": ("olmo3", exchanged_rotations),
    "layers that rotate exchanged with those that do not": ("smollm3", exchanged_rotations),
    "layers that rotate exchanged, EXAONE": ("exaone4", exchanged_rotations),
    "halves taken for neighbours": ("phi3", every_layer(other_rotation)),
    "neighbours taken for halves": ("glm4", lambda d: other_rotation(d.layers[0])),
    "scale of head_dim": ("gemma2", set_attention(scale=16**-0.5)),
    "scale of head_dim, Granite": ("granite", set_attention(scale=16**-0.5)),
    "scores not bent": ("gemma2", set_attention(soft_cap=None)),
    "logits not bent": ("gemma2", set_decoder(logits_cap=None)),
    "logits not divided": ("granite", set_decoder(logits_divisor=1.0)),
    "branches not multiplied": ("granite", every_layer(no_branch_factor)),
    "embeddings not multiplied": ("granite", plain_embedding),
    "embeddings not multiplied by a root": ("gemma3", plain_embedding),
    "positions without their offset": ("opt", moved_positions),
    "layer norms without their biases": ("opt", without_biases),
    "layer norms taken for RMS norms": ("opt", set_norms(kind="rms", bias=None)),
    "layer norms taken for RMS norms, Cohere": ("cohere", set_norms(kind="rms")),
    "ReLU taken for GELU": ("opt", every_layer(other_activation)),
    "feed-forward that reads attention's sum": ("cohere", in_sequence),
    "logits not multiplied": ("cohere", set_decoder(logits_factor=1.0)),
    "layers that rotate exchanged, Cohere 2": ("cohere2", exchanged_rotations),
    "positions without their offset, GPT-2": ("gpt2", moved_positions),
    "layer norms without their biases, GPT-2": ("gpt2", without_biases),
    "halves taken for neighbours, GPT-J": ("gptj", every_layer(other_rotation)),
    "feed-forward that reads attention's sum, GPT-J": ("gptj", in_sequence),
    "head without its bias": ("gptj", without_head_bias),
    "neighbours taken for halves, Falcon": ("falcon", every_layer(other_rotation)),
    "feed-forward that reads attention's sum, Falcon": ("falcon", in_sequence),
    "one norm of two": ("falcon 40b", every_layer(one_norm)),
    "norms of attention and feed-forward exchanged": ("falcon 40b", every_layer(swapped_norms)),
    "halves taken for neighbours, ERNIE": ("ernie4_5", lambda d: other_rotation(d.layers[0])),
    "halves taken for neighbours, GLM": ("glm", lambda d: other_rotation(d.layers[0])),
    "norms of heads before the rotation": ("hunyuan", set_attention(rotates_first=False)),
    "ReLU without its square": ("arcee", every_layer(plain_relu)),
    "norms of all heads taken for norms of each, MiniMax": (
        "minimax_m2",
        set_attention(q_norm=None),
    ),
    "experts chosen without the correction": ("minimax_m2", every_layer(by_scores_alone)),
    "shares of all experts, GraniteMoE": ("granite_moe", every_layer(unnormalized)),
    "branches not multiplied, GraniteMoE": ("granite_moe", every_layer(no_branch_factor)),
    "shared expert left out": ("granite_moe_shared", every_layer(without_shared)),
    "no biases of scores, BLOOM": ("bloom", set_attention(slopes=None)),
    "no biases of scores, MPT": ("mpt", set_attention(slopes=None)),
    "no biases of scores, Falcon": ("falcon_rw", set_attention(slopes=None)),
    "biases of scores that are not scaled": ("falcon_rw", every_layer(unscaled_slopes)),
    "norms exchanged, Falcon": ("falcon_rw", swapped("attention_norm", "mlp_norm")),
    "slopes in another order, BLOOM": ("bloom with 6 heads", every_layer(exchanged_slopes)),
    "slopes in another order, MPT": ("mpt with 6 heads", every_layer(exchanged_slopes)),
    "chunks one longer": ("llama4", every_layer(longer_chunk)),
    "all keys": ("llama4", set_attention(chunk_size=None)),
    "outputs of experts multiplied, Llama 4": ("llama4", every_layer(scaled_outputs)),
    "queries that do not grow, Llama 4": ("llama4", set_attention(query_scales=None)),
    "heads without their norms, Llama 4": (
        "llama4",
        set_attention(q_norm=None, k_norm=None, norms_heads=False),
    ),
    "halves taken for neighbours, Llama 4": ("llama4", lambda d: other_rotation(d.layers[0])),
    "values not normed, Gemma 4": ("gemma4", set_attention(v_norm=None)),
    "values with the weights of keys' norm": ("gemma4", every_layer(values_of_normed_keys)),
    "layers not multiplied, Gemma 4": ("gemma4", every_layer(unscaled)),
    "norms of both branches exchanged, Gemma 4": (
        "gemma4_moe",
        swapped("mlp.mlp_norm", "mlp.experts_end.norm"),
    ),
    "norms before and after experts exchanged, Gemma 4": (
        "gemma4_moe",
        swapped("mlp.experts_norm", "mlp.experts_end.norm"),
    ),
    "experts without a norm after, Gemma 4": (
        "gemma4_moe",
        every_layer(sum_of_branches_without_norms),
    ),
    "experts that read the feed-forward's input": (
        "gemma4_moe",
        every_layer(experts_read_dense_input),
    ),
    "router that reads the experts' input": ("gemma4_moe", every_layer(router_reads_experts_input)),
    "router without its norm": ("gemma4_moe", router_of(lambda r: setattr(r, "norm", None))),
    "router without its scale": (
        "gemma4_moe",
        router_of(lambda router: router.norm.weight.fill_(TINY["hidden_size"] ** -0.5)),
    ),
    "router without the root of the width": (
        "gemma4_moe",
        router_of(lambda router: router.norm.weight.mul_(TINY["hidden_size"] ** 0.5)),
    ),
    "experts without their scales": (
        "gemma4_moe",
        router_of(lambda router: router.expert_scale.fill_(1.0)),
    ),
    "experts with SiLU, Gemma 4": ("gemma4_moe", every_layer(swish)),
    "no inputs of layers": (
        "gemma4_shared",
        every_layer(lambda x: setattr(x, "layer_input", None)),
    ),
    "inputs of layers without a norm after": (
        "gemma4_shared",
        every_layer(lambda layer: setattr(layer.layer_input.end, "norm", None)),
    ),
    "inputs of layers with SiLU": (
        "gemma4_shared",
        every_layer(
            lambda x: setattr(x.layer_input, "activation", ActSpec(kind="silu", gated=False))
        ),
    ),
    "rows of layers' inputs not multiplied by a root": (
        "gemma4_shared",
        lambda decoder: setattr(decoder.layer_inputs.table, "factor", 1.0),
    ),
    "products of layers' inputs without their norm": (
        "gemma4_shared",
        lambda decoder: decoder.layer_inputs.norm.weight.fill_(1.0),
    ),
    "inputs of layers in another order": ("gemma4_shared", exchanged_inputs),
    "queries of shared layers not normed": (
        "gemma4_shared",
        shared_layers(lambda layer: layer.attention.q_norm.fill_(1.0)),
    ),
    "queries of shared layers that do not rotate": (
        "gemma4_shared",
        shared_layers(without_rotation),
    ),
    "slopes of xIELU exchanged": ("apertus", every_layer(exchanged_slopes_of_xielu)),
    "xIELU without its linear part": ("apertus", set_xielu(beta=0.0)),
    "one slope of xIELU for all layers": ("apertus", set_xielu(alpha_p=0.8)),
    "norms exchanged, Apertus": ("apertus", swapped("attention_norm", "mlp_norm")),
    "embeddings not normed": ("bloom", without_embedding_norm),
    "the whole head rotates, Bamba": ("bamba", lambda d: whole_rotation(d.layers[1])),
    "norms exchanged, Bamba": ("bamba", swapped("attention_norm", "mlp_norm")),
    "halves taken for neighbours, Helium": ("helium", lambda d: other_rotation(d.layers[0])),
    "window one longer, CWM": ("cwm", moved_window(1)),
    "ReLU without its square, Jais 2": ("jais2", every_layer(plain_relu)),
    "layer norms without their biases, Jais 2": ("jais2", without_biases),
    "scores not bent, VaultGemma": ("vaultgemma", set_attention(soft_cap=None)),
    "norms without their 1, VaultGemma": ("vaultgemma", without_offset),
    "experts chosen without the correction, Solar Open": (
        "solar_open",
        every_layer(by_scores_alone),
    ),
    "shared expert left out, Solar Open": ("solar_open", every_layer(without_shared)),
    "experts chosen without the correction, K-EXAONE": (
        "exaone_moe",
        lambda d: by_scores_alone(d.layers[1]),
    ),
    "layers that rotate exchanged, K-EXAONE": ("exaone_moe", exchanged_rotations),
    "window one longer, K-EXAONE": ("exaone_moe", moved_window(1)),
    "norms of all heads taken for norms of each, FlexOlmo": (
        "flex_olmo",
        set_attention(q_norm=None),
    ),
    "norms after taken for each other, FlexOlmo": (
        "flex_olmo",
        swapped("attention_end.norm", "mlp_end.norm"),
    ),
    "gates of attention left out, AFMoE": ("afmoe", every_layer(open_gates)),
    "experts chosen without the correction, AFMoE": (
        "afmoe",
        lambda d: by_scores_alone(d.layers[1]),
    ),
    "layers that rotate exchanged, AFMoE": ("afmoe", exchanged_rotations),
    "embeddings not multiplied by a root, AFMoE": ("afmoe", plain_embedding),
    "norms before and after exchanged, AFMoE": (
        "afmoe",
        swapped("attention_norm", "attention_end.norm"),
    ),
    "halves taken for neighbours, MiniCPM3": ("minicpm3", lambda d: other_rotation(d.layers[0])),
    "branches not multiplied, MiniCPM3": ("minicpm3", every_layer(no_branch_factor)),
    "embeddings not multiplied, MiniCPM3": ("minicpm3", plain_embedding),
    "logits not divided, MiniCPM3": ("minicpm3", set_decoder(logits_divisor=1.0)),
    "queries that do not grow, Mistral 4": ("mistral4", set_attention(query_scales=None)),
    "halves taken for neighbours, Mistral 4": ("mistral4", every_layer(other_rotation)),
    "shares of all experts, Mistral 4": ("mistral4", lambda d: unnormalized(d.layers[1])),
    "shares of all experts, Hunyuan": ("hunyuan_moe", every_layer(unnormalized)),
    "streams in another order, Gemma 3n": ("gemma3n", other_streams("into", lambda x: x.flip(0))),
    "streams not led back, Gemma 3n": ("gemma3n", other_streams("back", torch.zeros_like)),
    "streams not corrected, Gemma 3n": (
        "gemma3n",
        every_layer(lambda layer: layer.altup.correction_coefs.zero_()),
    ),
    "predictions transposed, Gemma 3n": (
        "gemma3n",
        every_layer(
            lambda layer: layer.altup.prediction_coefs.copy_(
                layer.altup.prediction_coefs.unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
            )
        ),
    ),
    "no product of low rank, Gemma 3n": ("gemma3n", every_layer(without_laurel)),
    "all gates, Gemma 3n": ("gemma3n", every_layer(without_sparsity)),
    "inputs that read an unscaled stream, Gemma 3n": (
        "gemma3n",
        every_layer(lambda layer: layer.output_scale.fill_(1.0)),
    ),
    "inputs of layers in another order, Gemma 3n": ("gemma3n", exchanged_inputs),
    "shares of both chosen experts, Phi-3.5-MoE": (
        "phimoe",
        set_routing(scores="softmax_of_chosen"),
    ),
    "shares of all other experts, Phi-3.5-MoE": ("phimoe", set_routing(jitter=1e4)),
    "head without its bias, Phi-3.5-MoE": ("phimoe", without_head_bias),
    "layer norms taken for RMS norms, Phi-3.5-MoE": ("phimoe", set_norms(kind="rms", bias=None)),
    "pairs that turn the usual way, nanochat": ("nanochat", turned_rotation),
    "embeddings not normed, nanochat": ("nanochat", without_embedding_norm),
    "queries not normed, nanochat": ("nanochat", every_layer(lambda x: x.attention.q_norm.mul_(2))),
    "logits not bent, nanochat": ("nanochat", set_decoder(logits_cap=None)),
    "rotation of the other kind of layer, Mellum": ("mellum", exchanged_rotations),
    "shares not normalized, Mellum": ("mellum", set_routing(normalized=False)),
    "experts chosen without the correction, Hy3": (
        "hy_v3",
        lambda decoder: by_scores_alone(decoder.layers[1]),
    ),
    "shares without their factor, Hy3": ("hy_v3", set_routing(factor=1.0)),
    "logits not multiplied, HyperCLOVA X": ("hyperclovax", set_decoder(logits_factor=1.0)),
    "no norms after, HyperCLOVA X": ("hyperclovax", every_layer(without_norms_after)),
    "halves taken for neighbours, Youtu": ("youtu", lambda d: other_rotation(d.layers[0])),
    "queries that do not grow": ("ministral3", set_attention(query_scales=None)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_reading_is_seen(model_of, wrong):
    """Each loads without an error; only a comparison of tokens finds it."""
    name, plant = WRONG[wrong]
    llm = LLM(model_of(name), device="cpu", max_model_len=64)
    right = llm.logits(TOKENS)
    with torch.inference_mode():
        plant(llm.engine.runner.decoder)
    assert relative(llm.logits(TOKENS), right) > 1e-3
