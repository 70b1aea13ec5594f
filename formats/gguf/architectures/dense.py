"""Architectures without experts."""

from collections.abc import Mapping
from typing import Any

from formats.errors import CheckpointError
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.parts import (
    AFTER,
    AROUND,
    ATTENTION_BIAS,
    BEFORE,
    GELU,
    GRANITE_FACTORS,
    LATE_NAME,
    MLP_BIAS,
    OF_HEADS,
    SOFTCAPS,
)
from formats.gguf.writing.container_writer import Value


def _ministral3_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return YaRN with the factors of scores, where the file states them."""
    scaling = dict(config.get("rope_scaling") or {})
    temperature = metadata.number("attention.temperature_scale")
    every = metadata.number("rope.scaling.yarn_log_multiplier")
    if scaling.get("rope_type") != "yarn":
        return {}
    if every:
        scaling |= {"mscale": 1.0, "mscale_all_dim": float(every)}
    if temperature:
        scaling["llama_4_scaling_beta"] = float(temperature)
    return {"rope_scaling": {**scaling, "rope_theta": config["rope_theta"]}}


def _ministral3_metadata(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the factors of scores. Raises CheckpointError for a first one that is not 1."""
    scaling = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    every, first = scaling.get("mscale_all_dim"), scaling.get("mscale") or 1.0
    if every and first != 1.0:
        raise CheckpointError(
            "config.json mscale", f"expected 1.0, which GGUF takes for granted, found {first}"
        )
    found = {
        "rope.scaling.yarn_log_multiplier": every,
        "attention.temperature_scale": scaling.get("llama_4_scaling_beta"),
    }
    return {key: Value(type="f32", value=value) for key, value in found.items() if value}


DENSE = (
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
        name="qwen3",
        family="Qwen3ForCausalLM",
        norms={**BEFORE, **OF_HEADS},
        fixed={"use_sliding_window": False},
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
        keys=GRANITE_FACTORS,
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
        default_part=0.5,
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
        default_part=0.5,
        fixed={"hidden_act": "relu2"},
        bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
    ),
    Architecture(name="gemma", family="GemmaForCausalLM", fixed=GELU, head="tied"),
    Architecture(
        name="arcee",
        family="ArceeForCausalLM",
        permuted=True,
        fixed={"hidden_act": "relu2"},
        bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
    ),
    Architecture(
        name="ernie4_5",
        family="Ernie4_5ForCausalLM",
        bias_keys={"use_bias": "ffn_up.bias"},
        needs={"use_bias": False},
    ),
    Architecture(
        name="hunyuan-dense",
        family="HunYuanDenseV1ForCausalLM",
        norms={
            **BEFORE,
            "attn_q_norm": "self_attn.query_layernorm",
            "attn_k_norm": "self_attn.key_layernorm",
        },
        bias_keys=ATTENTION_BIAS,
    ),
    # ChatGLM, GLM-4 9B
    Architecture(
        name="chatglm",
        family="GlmForCausalLM",
        bias_keys=ATTENTION_BIAS,
        needs_square_output=True,
        default_part=0.5,
    ),
    Architecture(
        name="mistral3",
        family="Ministral3ForCausalLM",
        permuted=True,
        more_config=_ministral3_config,
        more_metadata=_ministral3_metadata,
    ),
    Architecture(
        name="jais2",
        family="Jais2ForCausalLM",
        needs={"attention_bias": True, "mlp_bias": True},
        fixed={"hidden_act": "relu2"},
        bias_keys={**ATTENTION_BIAS, **MLP_BIAS},
    ),
    Architecture(
        name="apertus",
        family="ApertusForCausalLM",
        norms={"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm", **OF_HEADS},
        fixed={"hidden_act": "xielu"},
        bias_keys=ATTENTION_BIAS,
        scalars={
            f"xielu.{name}": f"mlp.act_fn.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")
        },
        head="own",
    ),
    # EXAONE 3: a Llama whose rotated pairs are in the usual order
    Architecture(name="exaone", family="LlamaForCausalLM"),
)
