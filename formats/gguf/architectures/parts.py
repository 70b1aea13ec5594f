"""Names of norms and keys of metadata that several architectures share."""

FREQUENCIES = "rope_freqs.weight"  # tensor of divisors of the frequencies of rotation
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
SIGMOID = {"expert_gating_func": 2}  # experts are chosen by sigmoid
