"""Architectures with experts."""

from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.converted import ConvertedTensor
from formats.gguf.architectures.expert_layers import (
    ernie_metadata,
    gpt_oss_metadata,
    hunyuan_metadata,
    llama4_config,
    llama4_metadata,
    mellum_config,
    mellum_metadata,
    phimoe_metadata,
)
from formats.gguf.architectures.layers import dense_first, dense_first_metadata
from formats.gguf.architectures.parts import (
    AROUND,
    ATTENTION_BIAS,
    BEFORE,
    BY_SIGMOID,
    DENSE_FIRST,
    EXPERT_GROUPS,
    EXPERTS,
    GRANITE_EXPERTS,
    GRANITE_FACTORS,
    HUNYUAN_HEADS,
    LATE_NAME,
    OF_HEADS,
    ONE_GROUP,
    SHARED_EXPERTS,
    USED,
    USUAL_ROUTING,
)

# Weights of experts where a file leaves a key out
_USUAL = {**USUAL_ROUTING, "norm_topk_prob": False}

MIXTURES = (
    Architecture(
        name="qwen2moe",
        family="Qwen2MoeForCausalLM",
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        fixed={"norm_topk_prob": False, "use_sliding_window": False, "decoder_sparse_step": 1},
    ),
    Architecture(
        name="qwen3moe",
        family="Qwen3MoeForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={**EXPERTS, "num_experts": "expert_count"},
        fixed={"norm_topk_prob": True, "use_sliding_window": False, "decoder_sparse_step": 1},
        bias_keys=ATTENTION_BIAS,
    ),
    Architecture(
        name="gpt-oss",
        family="GptOssForCausalLM",
        norms=LATE_NAME,
        keys={
            **USED,
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        # llama.cpp has these numbers in its code, and reads biases and a separate head
        fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},
        needs={"attention_bias": True},
        more_metadata=gpt_oss_metadata,
        head="own",
        window="pattern",
        pattern=2,
        bias_keys=ATTENTION_BIAS,
    ),
    # GLM-4.5, Solar Open
    Architecture(
        name="glm4moe",
        family="Glm4MoeForCausalLM",
        also=("SolarOpenForCausalLM",),
        norms={**LATE_NAME, **OF_HEADS},
        keys={
            **EXPERTS,
            "n_routed_experts": "expert_count",
            **SHARED_EXPERTS,
            **DENSE_FIRST,
        },
        fixed={**ONE_GROUP, "first_k_dense_replace": 0},
        constants=BY_SIGMOID,
        bias_keys={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    ),
    Architecture(
        name="olmoe",
        family="OlmoeForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={**USED, "num_experts": "expert_count"},
        fixed={"norm_topk_prob": False, "attention_bias": False, "clip_qkv": None},
        needs_square_output=True,
        needs_all_kv_heads=True,
        head="own",
    ),
    # llama.cpp routes by softmax, which is close to sparsemixer, but not the same
    Architecture(
        name="phimoe",
        family="PhimoeForCausalLM",
        keys={**USED, "num_local_experts": "expert_count"},
        fixed={"router_jitter_noise": 0.01},
        window="all",
        bias_keys={"attention_bias": "attn_q.bias", "lm_head_bias": "output.bias"},
        more_metadata=phimoe_metadata,
        head="own",
    ),
    Architecture(
        name="granitemoe",
        family="GraniteMoeForCausalLM",
        with_shared="GraniteMoeSharedForCausalLM",
        permuted=True,
        keys={**GRANITE_FACTORS, **GRANITE_EXPERTS},
        tensors={
            "ffn_gate_shexp.weight": ConvertedTensor(
                name="shared_mlp.input_linear.weight", below="ffn_up_shexp.weight"
            )
        },
        bias_keys=ATTENTION_BIAS,
    ),
    Architecture(
        name="hunyuan-moe",
        family="HunYuanMoEV1ForCausalLM",
        norms={**BEFORE, **HUNYUAN_HEADS},
        keys={**USED, "num_experts": "expert_count"},
        more_metadata=hunyuan_metadata,
        bias_keys=ATTENTION_BIAS,
    ),
    Architecture(
        name="ernie4_5-moe",
        family="Ernie4_5_MoeForCausalLM",
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "moe_num_shared_experts": "expert_shared_count",
            "moe_layer_interval": "interleave_moe_layer_step",
            "moe_layer_start_index": "leading_dense_block_count",
        },
        fixed={"use_bias": False},
        more_metadata=ernie_metadata,
    ),
    Architecture(
        name="minimax-m2",
        family="MiniMaxM2ForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={
            **USED,
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        constants=BY_SIGMOID,
        head="own",
    ),
    Architecture(
        name="dots1",
        family="Dots1ForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={
            **EXPERTS,
            **SHARED_EXPERTS,
            **DENSE_FIRST,
            "n_routed_experts": "expert_count",
            **EXPERT_GROUPS,
        },
        fixed={**_USUAL, "attention_bias": False},
        constants=BY_SIGMOID,
        needs_all_kv_heads=True,
        head="own",
    ),
    Architecture(
        name="llama4",
        family="Llama4ForCausalLM",
        keys={**USED, "num_local_experts": "expert_count"},
        # llama.cpp's numbers
        fixed={
            **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
            **{"attn_temperature_tuning": True, "attention_bias": False},
            **{"no_rope_layer_interval": 4},
        },
        more_config=llama4_config,
        more_metadata=llama4_metadata,
    ),
    Architecture(
        name="afmoe",
        family="AfmoeForCausalLM",
        norms={**AROUND, "ffn_norm": "pre_mlp_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
        | OF_HEADS,
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "n_shared_experts": "expert_shared_count",
            "route_scale": "expert_weights_scale",
            "num_dense_layers": "leading_dense_block_count",
        },
        # llama.cpp rotates in all layers but every fourth
        fixed={
            **{"mup_enabled": True, "n_group": 1, "topk_group": 1, "attention_bias": False},
            "global_attn_every_n_layers": 4,
        },
        window="pattern",
        pattern=4,
        constants={**BY_SIGMOID, "expert_weights_norm": True},
    ),
    Architecture(
        name="mellum",
        family="MellumForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={**EXPERTS, "num_experts": "expert_count"},
        fixed={"norm_topk_prob": True, "attention_bias": False},
        window="pattern",
        pattern=4,
        more_config=mellum_config,
        more_metadata=mellum_metadata,
        head="own",
    ),
    Architecture(
        name="hy_v3",
        family="HYV3ForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={
            **EXPERTS,
            "num_experts": "expert_count",
            "router_scaling_factor": "expert_weights_scale",
        },
        # a bias without a leaf in its name
        tensors={"exp_probs_b": ConvertedTensor(name="mlp.expert_bias")},
        bias_keys=ATTENTION_BIAS,
        constants={**BY_SIGMOID, "expert_weights_norm": True},
        more_config=dense_first,
        more_metadata=dense_first_metadata,
    ),
    Architecture(
        name="exaone-moe",
        family="ExaoneMoeForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        keys={**EXPERTS, **SHARED_EXPERTS, "num_experts": "expert_count", **EXPERT_GROUPS},
        fixed={**_USUAL, "first_k_dense_replace": 1},
        window="pattern",
        pattern=4,
        constants=BY_SIGMOID,
        more_config=dense_first,
        more_metadata=dense_first_metadata,
        head="own",
    ),
)
