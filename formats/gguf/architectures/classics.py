"""Architectures of GPT-2 and other older families: LayerNorm, a feed-forward without a gate."""

from collections.abc import Mapping
from typing import Any

from formats.architecture.flags import Equals
from formats.gguf.architectures.architecture import Architecture, Variant
from formats.gguf.architectures.parts import ATTENTION_BIAS, BEFORE

# Norms of GPT-2 and GPT-BigCode
_GPT_NORMS = {"attn_norm": "ln_1", "ffn_norm": "ln_2"}


def _bigcode_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return whether all heads share one key and value."""
    return {"multi_query": config["num_key_value_heads"] == 1}


def _falcon_config(metadata: Any, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the kind of the decoder: 7B has one KV head and one norm, later ones several heads."""
    is_new = config["num_key_value_heads"] > 1 or metadata.architecture.norms is _FALCON_TWO_NORMS
    found = {"new_decoder_architecture": is_new, "multi_query": not is_new}
    if is_new:
        norms = 2 if metadata.architecture.norms is _FALCON_TWO_NORMS else 1
        found |= {"num_kv_heads": config["num_key_value_heads"], "num_ln_in_parallel_attn": norms}
    return found


_FALCON_TWO_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
CLASSICS = (
    Architecture(name="gpt2", family="GPT2LMHeadModel", norms=_GPT_NORMS),
    Architecture(
        name="starcoder",
        family="GPTBigCodeForCausalLM",
        norms=_GPT_NORMS,
        more_config=_bigcode_config,
    ),
    Architecture(
        name="gptneox",
        family="GPTNeoXForCausalLM",
        norms=BEFORE,
        keys={"use_parallel_residual": "use_parallel_residual"},
        fixed={"use_parallel_residual": True},
        bias_keys={"attention_bias": "attn_qkv.bias"},
        rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        default_theta=10000.0,
        default_part=0.25,
        head="own",
    ),
    Architecture(
        name="falcon",
        family="FalconForCausalLM",
        norms={"attn_norm": "input_layernorm"},
        fixed={"bias": False, "alibi": False, "parallel_attn": True},
        needs={"bias": False, "alibi": False, "parallel_attn": True},
        variants=(
            Variant(
                "attn_norm_2.weight",
                Equals("num_ln_in_parallel_attn", 2),
                {"norms": _FALCON_TWO_NORMS},
            ),
        ),
        more_config=_falcon_config,
        states_head_dim=False,
        default_theta=10000.0,
    ),
    Architecture(
        name="bloom",
        family="BloomForCausalLM",
        norms=BEFORE,
    ),
    Architecture(
        name="mpt",
        family="MptForCausalLM",
        norms={"attn_norm": "norm_1", "ffn_norm": "norm_2"},
        constants={"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": None},
    ),
    Architecture(
        name="stablelm",
        family="StableLmForCausalLM",
        bias_keys={"use_qkv_bias": "attn_q.bias"},
        constants={"use_parallel_residual": False},
        default_part=0.25,
        head="own",
    ),
    Architecture(
        name="phi2",
        family="PhiForCausalLM",
        norms={"attn_norm": "input_layernorm"},
        default_part=0.5,
        head="own",
    ),
    Architecture(
        name="olmo",
        family="OlmoForCausalLM",
        norms={},
        permuted=True,
        bias_keys=ATTENTION_BIAS,
        constants={"attention.clamp_kqv": None},
    ),
)
