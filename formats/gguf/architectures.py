"""GGUF's architectures: one row each, on top of the family's row in formats/families.py.

A row says what GGUF does differently from the family's checkpoint: names of norms, order of the
rows of q and k, and which metadata is which key of config.json. Needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from formats.architecture.family import Family
from formats.errors import CheckpointError
from formats.families import FAMILIES

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Row of the table: one value of `general.architecture`."""

    name: str
    family: str  # architecture of the family's row
    norms: Mapping[str, str] = field(default_factory=lambda: BEFORE)
    # Rows of q and k are in the order of rotated pairs (2 i, 2 i + 1), not of halves.
    permuted: bool = False
    # config.json key -> metadata key below the architecture; left out where the file has none
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # keys with one value in all models
    # Layers with a sliding window: "all", or every n-th layer has none; 0: no layer has one.
    window: Literal["", "all", "pattern"] = ""
    pattern: int = 0  # the usual n; the file may state its own
    bias_keys: Mapping[str, str] = field(default_factory=dict)  # config.json key -> a layer's bias
    # Families of files with experts, or with a window, under the same name
    with_experts: str = ""
    with_window: str = ""
    with_sigmoid: str = ""  # experts are chosen by sigmoid
    also: tuple[str, ...] = ()  # families with the same layers, which are written so

    def family_of(self, *, has_experts: bool, has_window: bool, by_sigmoid: bool = False) -> Family:
        """Return the family's row for a file with experts, chosen by sigmoid, or a window."""
        name = (has_experts and self.with_experts) or (has_window and self.with_window)
        name = (by_sigmoid and self.with_sigmoid) or name
        return FAMILIES[name or self.family]

    @property
    def is_latent(self) -> bool:
        """Return True for latent attention."""
        return bool(FAMILIES[self.family].latent)


ATTENTION_BIAS = {"attention_bias": "attn_q.bias"}
MLP_BIAS = {"mlp_bias": "ffn_up.bias"}
EXPERTS = {
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
SOFTCAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}

ARCHITECTURES: dict[str, Architecture] = {
    row.name: row
    for row in (
        Architecture(
            name="llama",
            family="LlamaForCausalLM",
            permuted=True,
            keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            window="all",
            bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
            with_experts="MixtralForCausalLM",
            with_window="MistralForCausalLM",
        ),
        Architecture(
            name="qwen2",
            family="Qwen2ForCausalLM",
            fixed={"use_sliding_window": False},
        ),
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
            name="qwen3",
            family="Qwen3ForCausalLM",
            norms={**BEFORE, **OF_HEADS},
            fixed={"use_sliding_window": False},
            bias_keys=ATTENTION_BIAS,
        ),
        Architecture(
            name="qwen3moe",
            family="Qwen3MoeForCausalLM",
            norms={**BEFORE, **OF_HEADS},
            keys={**EXPERTS, "num_experts": "expert_count"},
            fixed={"norm_topk_prob": True, "use_sliding_window": False, "decoder_sparse_step": 1},
            bias_keys=ATTENTION_BIAS,
        ),
        Architecture(name="phi3", family="Phi3ForCausalLM", window="all"),
        Architecture(
            name="gemma2",
            family="Gemma2ForCausalLM",
            norms=AROUND,
            keys=SOFTCAPS,
            fixed=GELU,
            window="pattern",
            pattern=2,
        ),
        Architecture(
            name="gemma3",
            family="Gemma3ForCausalLM",
            norms={**AROUND, **OF_HEADS},
            keys={"final_logit_softcapping": "final_logit_softcapping"},
            fixed={**GELU, "rope_local_base_freq": 10000.0},
            window="pattern",
            pattern=6,
        ),
        Architecture(
            name="granite",
            family="GraniteForCausalLM",
            permuted=True,
            keys={
                "attention_multiplier": "attention.scale",
                "embedding_multiplier": "embedding_scale",
                "residual_multiplier": "residual_scale",
                "logits_scaling": "logit_scale",
            },
            bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
        ),
        Architecture(
            name="smollm3",
            family="SmolLM3ForCausalLM",
            permuted=True,
            fixed={"no_rope_layer_interval": 4, "use_sliding_window": False},
            bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
        ),
        Architecture(
            name="seed_oss",
            family="SeedOssForCausalLM",
            norms=LATE_NAME,
            bias_keys={
                **ATTENTION_BIAS,
                **MLP_BIAS,
                "attention_out_bias": "attn_output.bias",
            },
        ),
        Architecture(
            name="olmo2",
            family="Olmo2ForCausalLM",
            norms={**AFTER, **OF_HEADS},
            window="pattern",
            pattern=4,
            bias_keys=ATTENTION_BIAS,
            with_window="Olmo3ForCausalLM",
        ),
        Architecture(
            name="exaone4",
            family="Exaone4ForCausalLM",
            norms={**AFTER, **OF_HEADS},
            window="pattern",
            pattern=4,
        ),
        Architecture(
            name="glm4",
            family="Glm4ForCausalLM",
            norms={
                **BEFORE,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
            bias_keys=ATTENTION_BIAS,
        ),
        Architecture(
            name="command-r",
            family="CohereForCausalLM",
            norms={"attn_norm": "input_layernorm"},
            keys={"logit_scale": "logit_scale"},
            bias_keys=ATTENTION_BIAS,
        ),
        Architecture(
            name="cohere2",
            family="Cohere2ForCausalLM",
            norms={"attn_norm": "input_layernorm"},
            keys={"logit_scale": "logit_scale"},
            window="pattern",
            pattern=4,
            bias_keys=ATTENTION_BIAS,
        ),
        Architecture(
            name="starcoder2",
            family="Starcoder2ForCausalLM",
            fixed={"hidden_act": "gelu_pytorch_tanh"},
            window="all",
            bias_keys={"use_bias": "attn_q.bias"},
        ),
        Architecture(
            name="nemotron",
            family="NemotronForCausalLM",
            fixed={"hidden_act": "relu2"},
            bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
        ),
        Architecture(
            name="gpt-oss",
            family="GptOssForCausalLM",
            norms=LATE_NAME,
            keys={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            window="pattern",
            pattern=2,
            bias_keys=ATTENTION_BIAS,
        ),
        # DeepSeek-V2, V3, R1, Moonlight, Kimi-K2, GLM-4.7-Flash
        Architecture(
            name="deepseek2",
            family="DeepseekV2ForCausalLM",
            with_sigmoid="DeepseekV3ForCausalLM",
            also=("Glm4MoeLiteForCausalLM",),
            norms={**BEFORE, **OF_LATENTS},
            keys={
                **EXPERTS,
                "kv_lora_rank": "attention.kv_lora_rank",
                "n_routed_experts": "expert_count",
                "n_shared_experts": "expert_shared_count",
                "routed_scaling_factor": "expert_weights_scale",
                "norm_topk_prob": "expert_weights_norm",
                "first_k_dense_replace": "leading_dense_block_count",
                "n_group": "expert_group_count",
                "topk_group": "expert_group_used_count",
            },
            fixed={
                **{"routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
                **{"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
            },
        ),
        Architecture(
            name="glm4moe",
            family="Glm4MoeForCausalLM",
            norms={**LATE_NAME, **OF_HEADS},
            keys={
                **EXPERTS,
                "n_routed_experts": "expert_count",
                "n_shared_experts": "expert_shared_count",
                "routed_scaling_factor": "expert_weights_scale",
                "norm_topk_prob": "expert_weights_norm",
                "first_k_dense_replace": "leading_dense_block_count",
            },
            fixed={"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
            bias_keys={**ATTENTION_BIAS, "use_qk_norm": "attn_q_norm.weight"},
        ),
    )
}


def find_architecture(name: Any, subject: str) -> Architecture:
    """Return the row of an architecture. Raises CheckpointError if there is none."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(subject, "has no general.architecture", "fetch the file again")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{subject}: general.architecture",
            f"expected one of {', '.join(ARCHITECTURES)}, found {name!r:.60}",
            "use a model of one of these architectures",
        )
    return ARCHITECTURES[name]
