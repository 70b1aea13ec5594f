"""Names of norms and keys of metadata that several architectures share."""

FREQUENCIES = "rope_freqs.weight"  # tensor of RoPE's frequency divisors
# GGUF's name of a norm -> the family's, below the layer
BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OF_LATENTS = {
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
}
OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
HUNYUAN_HEADS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
AROUND = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp calls the norm before the feed-forward so in some architectures
LATE_NAME = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}

ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
MLP_BIAS = {"mlp_bias": "ffn_up.bias"}
USED = {"num_experts_per_tok": "expert_used_count"}
EXPERTS = {
    **USED,
    "moe_intermediate_size": "expert_feed_forward_length",
}
SHARED_EXPERTS = {
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
}
DENSE_FIRST = {"first_k_dense_replace": "leading_dense_block_count"}
EXPERT_GROUPS = {"n_group": "expert_group_count", "topk_group": "expert_group_used_count"}
# Values where a file leaves a key out
ONE_GROUP = {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0}
USUAL_ROUTING = {"routed_scaling_factor": 1.0, "first_k_dense_replace": 0, **ONE_GROUP}
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
GRANITE_FACTORS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
GRANITE_EXPERTS = {
    **USED,
    "num_local_experts": "expert_count",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
}
# values of expert_gating_func: what the experts' logits go through before the choice
SOFTMAX = 1
SIGMOID = 2
BY_SIGMOID = {"expert_gating_func": SIGMOID}
