"""Architectures whose layers have states: delta nets, Mamba-2, short convolutions."""

import math
from typing import Any

from formats.architecture.flags import Equals, Stated
from formats.gguf.architectures.architecture import Architecture, Variant
from formats.gguf.architectures.converted import ConvertedTensor
from formats.gguf.architectures.delta_layers import (
    by_intervals,
    intervals_metadata,
    kimi_config,
    kimi_metadata,
    minimax_config,
    minimax_metadata,
)
from formats.gguf.architectures.layers import by_kv_heads, kv_heads_metadata
from formats.gguf.architectures.mamba_layers import (
    FACTORS,
    bamba_config,
    bamba_metadata,
    falcon_h1_config,
    falcon_h1_factors,
    falcon_h1_metadata,
    mamba_config,
    mamba_metadata,
    nemotron_config,
    nemotron_metadata,
)
from formats.gguf.architectures.parts import (
    ATTENTION_BIAS,
    BEFORE,
    BY_SIGMOID,
    EXPERTS,
    GRANITE_FACTORS,
    LATE_NAME,
    MLP_BIAS,
    OF_HEADS,
    OF_LATENTS,
    USED,
)

_DELTA_KEYS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_SHARED = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_MAMBA_KEYS = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}


def _delta(values: str, heads: str) -> dict[str, ConvertedTensor]:
    """Return the tensors of delta nets that have orders of value heads by these names."""
    return {
        "ssm_conv1d.weight": ConvertedTensor(
            name="linear_attn.conv1d.weight",
            shape="taps",
            rows=values and "values_after_keys",
        ),
        "ssm_a": ConvertedTensor(name="linear_attn.A_log", exponent=True, rows=heads),
        "ssm_dt.bias": ConvertedTensor(name="linear_attn.dt_bias", rows=heads),
        "ssm_norm.weight": ConvertedTensor(name="linear_attn.norm.weight"),
        "ssm_out.weight": ConvertedTensor(name="linear_attn.out_proj.weight", columns=values),
    }


# Value heads are tiled over the key heads
_QWEN_35: dict[str, Any] = {
    "norms": {**LATE_NAME, **OF_HEADS},
    "bias_keys": ATTENTION_BIAS,
    "tensors": {
        **_delta("values", "heads"),
        "attn_qkv.weight": ConvertedTensor(
            name="linear_attn.in_proj_qkv.weight", rows="values_after_keys"
        ),
        "attn_gate.weight": ConvertedTensor(name="linear_attn.in_proj_z.weight", rows="values"),
        "ssm_beta.weight": ConvertedTensor(name="linear_attn.in_proj_b.weight", rows="heads"),
        "ssm_alpha.weight": ConvertedTensor(name="linear_attn.in_proj_a.weight", rows="heads"),
    },
    "default_part": 0.25,
    "more_config": by_intervals,
    "more_metadata": intervals_metadata,
}


def mamba_tensors(module: str) -> dict[str, ConvertedTensor]:
    return {
        "ssm_in.weight": ConvertedTensor(name=f"{module}.in_proj.weight"),
        "ssm_in.bias": ConvertedTensor(name=f"{module}.in_proj.bias"),
        "ssm_out.weight": ConvertedTensor(name=f"{module}.out_proj.weight"),
        "ssm_out.bias": ConvertedTensor(name=f"{module}.out_proj.bias"),
        "ssm_conv1d.weight": ConvertedTensor(name=f"{module}.conv1d.weight", shape="taps"),
        "ssm_conv1d.bias": ConvertedTensor(name=f"{module}.conv1d.bias"),
        "ssm_a": ConvertedTensor(name=f"{module}.A_log", exponent=True, shape="column"),
        "ssm_d": ConvertedTensor(name=f"{module}.D", shape="column"),
        "ssm_dt.bias": ConvertedTensor(name=f"{module}.dt_bias"),
        "ssm_norm.weight": ConvertedTensor(name=f"{module}.norm.weight", shape="groups"),
    }


_LFM2: dict[str, Any] = {
    "norms": {
        "attn_norm": "operator_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
    },
    "output_norm": "token_embd_norm",
    "linears": {"shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj"},
    "tensors": {"shortconv.conv.weight": ConvertedTensor(name="conv.conv.weight", shape="taps")},
    "fixed": {"conv_bias": False},
    "more_config": by_kv_heads("conv"),
    "more_metadata": kv_heads_metadata("conv"),
    "needs_square_output": True,
}
_GRANITE_MLP = {
    "ffn_gate.weight": ConvertedTensor(
        name="shared_mlp.input_linear.weight", below="ffn_up.weight"
    ),
}
_GRANITE_SHARED = {
    "ffn_gate_shexp.weight": ConvertedTensor(
        name="shared_mlp.input_linear.weight", below="ffn_up_shexp.weight"
    ),
}
# Granite's mixers without its factors; a part of each head rotates
_BAMBA: dict[str, Any] = {
    "family": "BambaForCausalLM",
    "permuted": False,
    "norms": {"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
    "keys": _MAMBA_KEYS,
    "bias_keys": {**ATTENTION_BIAS, **MLP_BIAS, "mamba_conv_bias": "ssm_conv1d.bias"},
    "tensors": {
        **mamba_tensors("mamba"),
        **{
            f"attn_{x}.{leaf}": ConvertedTensor(
                name=f"self_attn.{x}_proj.{leaf}", rows=f"pairs_of_{rows}"
            )
            for x, rows in (("q", "queries"), ("k", "keys"))
            for leaf in ("weight", "bias")
        },
    },
    "default_part": 0.5,
    "more_config": bamba_config,
    "more_metadata": bamba_metadata,
}
_NEMOTRON: dict[str, Any] = {
    "family": "NemotronHForCausalLM",
    "norms": {"attn_norm": "norm"},
    "bias_keys": {
        "use_bias": "ssm_in.bias",
        "use_conv_bias": "ssm_conv1d.bias",
        "mlp_bias": "ffn_up.bias",
    },
    "tensors": mamba_tensors("mixer"),
    "more_config": nemotron_config,
    "more_metadata": nemotron_metadata,
}
_NEMOTRON_EXPERTS: dict[str, Any] = {
    "name": "nemotron_h_moe",
    "keys": {
        **_MAMBA_KEYS,
        **EXPERTS,
        "n_routed_experts": "expert_count",
        "n_shared_experts": "expert_shared_count",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
    },
    "fixed": {"n_group": 1, "topk_group": 1},
    "uncompared": ("intermediate_size",),  # no layer has a dense feed-forward
    "linears": {
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
}
_KIMI_GATES = ("f_a", "f_b", "g_a", "g_b")
HYBRIDS = (
    Architecture(
        name="qwen3next",
        family="Qwen3NextForCausalLM",
        norms={**LATE_NAME, **OF_HEADS},
        keys={**EXPERTS, **_SHARED, **_DELTA_KEYS, "num_experts": "expert_count"},
        fixed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        bias_keys=ATTENTION_BIAS,
        tensors={
            **_delta("", ""),
            "attn_qkv.weight": ConvertedTensor(
                name="linear_attn.in_proj_qkvz.weight",
                rows="by_key_head",
                below="attn_gate.weight",
            ),
            "ssm_ba.weight": ConvertedTensor(name="linear_attn.in_proj_ba.weight"),
        },
        default_part=0.25,
        more_config=by_intervals,
        more_metadata=intervals_metadata,
    ),
    Architecture(name="qwen35", family="Qwen3_5ForCausalLM", keys=_DELTA_KEYS, **_QWEN_35),
    Architecture(
        name="qwen35moe",
        family="Qwen3_5MoeForCausalLM",
        keys={**EXPERTS, **_SHARED, **_DELTA_KEYS, "num_experts": "expert_count"},
        **_QWEN_35,
    ),
    Architecture(
        name="lfm2",
        family="Lfm2ForCausalLM",
        keys={"conv_L_cache": "shortconv.l_cache"},
        **{**_LFM2, "fixed": {"conv_bias": False, "block_auto_adjust_ff_dim": False}},
    ),
    Architecture(
        name="lfm2moe",
        family="Lfm2MoeForCausalLM",
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "num_dense_layers": "leading_dense_block_count",
            "conv_L_cache": "shortconv.l_cache",
        },
        constants=BY_SIGMOID,
        **{**_LFM2, "fixed": {"conv_bias": False, "routed_scaling_factor": 1.0}},
    ),
    Architecture(
        name="granitehybrid",
        family="GraniteMoeHybridForCausalLM",
        also=("BambaForCausalLM",),
        permuted=True,
        keys={
            **GRANITE_FACTORS,
            **_MAMBA_KEYS,
            **USED,
            "num_local_experts": "expert_count",
            "shared_intermediate_size": "expert_shared_feed_forward_length",
        },
        fixed={"mamba_expand": 2, "mamba_proj_bias": False},
        bias_keys={**ATTENTION_BIAS, "mamba_conv_bias": "ssm_conv1d.bias"},
        tensors={**mamba_tensors("mamba"), **_GRANITE_MLP},
        needs={"time_step_limit": [0.0, math.inf]},  # llama.cpp has no limits
        variants=(
            Variant("", Equals("model_type", "bamba"), _BAMBA, tuple(GRANITE_FACTORS.values())),
            Variant(
                "ffn_gate_inp.weight",
                Stated("num_local_experts", True),
                {"tensors": {**mamba_tensors("mamba"), **_GRANITE_SHARED}},
            ),
        ),
        more_config=mamba_config,
        more_metadata=mamba_metadata,
    ),
    Architecture(
        name="falcon-h1",
        family="FalconH1ForCausalLM",
        norms={"attn_norm": "input_layernorm"},
        keys=_MAMBA_KEYS,
        fixed={"attention_bias": False, "mamba_proj_bias": False, "mamba_norm_before_gate": False},
        bias_keys={
            "mlp_bias": "ffn_up.bias",
            "projectors_bias": "ssm_out.bias",
            "mamba_conv_bias": "ssm_conv1d.bias",
        },
        # a norm without a leaf in its name
        tensors={
            **mamba_tensors("mamba"),
            "ffn_norm": ConvertedTensor(name="pre_ff_layernorm.weight"),
        },
        factors=falcon_h1_factors,
        uncompared=(*FACTORS, "ssm_multipliers", "mlp_multipliers"),
        more_config=falcon_h1_config,
        more_metadata=falcon_h1_metadata,
        head="own",
    ),
    Architecture(
        name="nemotron_h",
        keys=_MAMBA_KEYS,
        # the same family, with experts
        variants=(Variant("", "mlp_layer_types", _NEMOTRON_EXPERTS),),
        **_NEMOTRON,
    ),
    Architecture(**_NEMOTRON, **_NEMOTRON_EXPERTS),
    Architecture(
        name="kimi-linear",
        family="KimiLinearForCausalLM",
        norms={**BEFORE, **OF_LATENTS},
        keys={
            **EXPERTS,
            "kv_lora_rank": "attention.kv_lora_rank",
            "linear_conv_kernel_dim": "ssm.conv_kernel",
            "linear_head_dim": "kda.head_dim",
            "num_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
        },
        fixed={"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
        constants=BY_SIGMOID,
        linears={"ssm_beta": "self_attn.b_proj"}
        | {f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"}
        | {f"ssm_{name}": f"self_attn.{name}_proj" for name in _KIMI_GATES},
        tensors={
            **{
                f"ssm_conv1d_{x}.weight": ConvertedTensor(
                    name=f"self_attn.{x}_conv1d.weight", shape="wide_taps"
                )
                for x in "qkv"
            },
            "ssm_a": ConvertedTensor(name="self_attn.A_log", exponent=True, shape="heads"),
            "ssm_dt.bias": ConvertedTensor(name="self_attn.dt_bias"),
            "ssm_norm.weight": ConvertedTensor(name="self_attn.o_norm.weight"),
        },
        more_config=kimi_config,
        more_metadata=kimi_metadata,
        head="own",
    ),
    Architecture(
        name="minimax-01",
        family="MiniMaxForCausalLM",
        norms={**BEFORE, "attn_norm_2": "self_attn.norm"},
        keys={**USED, "num_local_experts": "expert_count"},
        fixed=dict.fromkeys(
            ("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"), 1.0
        ),
        state_linears={
            "attn_qkv": "self_attn.qkv_proj",
            "attn_gate": "self_attn.output_gate",
            "attn_output": "self_attn.out_proj",
        },
        more_config=minimax_config,
        more_metadata=minimax_metadata,
    ),
)
