"""Families whose code is in the model's folder: shapes of the rows add up to published numbers."""

import math

import pytest

from formats.architecture.sizes import size
from formats.architecture.stored_form.config import canonical_config
from formats.families import FAMILIES

# billions of parameters; architecture; config.json as published, only its sizes
PUBLISHED = {
    "internlm2_5-7b": (7.74, "InternLM2ForCausalLM", (4096, 32, 32, 8, 14336, 92544)),
    "internlm2-20b": (19.86, "InternLM2ForCausalLM", (6144, 48, 48, 8, 16384, 92544)),
    "Baichuan2-13B": (13.9, "BaichuanForCausalLM", (5120, 40, 40, None, 13696, 125696)),
    "Qwen-7B": (7.72, "QWenLMHeadModel", (4096, 32, 32, None, 22016, 151936)),
    "Orion-14B": (14.5, "OrionForCausalLM", (5120, 40, 40, 40, 15360, 84608)),
    "solar-pro": (22.1, "SolarForCausalLM", (5120, 64, 40, 10, 17920, 32128)),
    "EXAONE-3.5-7.8B": (7.82, "ExaoneForCausalLM", (4096, 32, 32, 8, 14336, 102400)),
    "EXAONE-3.5-2.4B": (2.41, "ExaoneForCausalLM", (2560, 30, 32, 8, 7168, 102400)),
    "Ling-lite": (16.8, "BailingMoeForCausalLM", (2048, 28, 16, 4, 5632, 126464)),
    "Ling-mini-2.0": (16.26, "BailingMoeV2ForCausalLM", (2048, 20, 16, 4, 5120, 157184)),
    "sarvam-105b": (106.0, "SarvamMLAForCausalLM", (4096, 32, 64, None, 16384, 262144)),
}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
KEYS += ("intermediate_size", "vocab_size")
MORE = {
    "internlm2_5-7b": {"bias": False},
    "internlm2-20b": {"bias": False},
    "Qwen-7B": {"kv_channels": 128},
    "Orion-14B": {"rms_norm_eps": 1e-5},
    "EXAONE-3.5-7.8B": {"num_layers": 32, "head_dim": 128, "tie_word_embeddings": False},
    "EXAONE-3.5-2.4B": {"num_layers": 30, "head_dim": 80, "tie_word_embeddings": True},
    "Ling-lite": {"num_experts": 64, "moe_intermediate_size": 1408, "num_shared_experts": 2},
    "sarvam-105b": {
        **{"num_experts": 128, "moe_intermediate_size": 2048, "num_shared_experts": 1},
        **{"first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_nope_head_dim": 128},
        **{"qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 576},
    },
    "Ling-mini-2.0": {
        **{"num_experts": 256, "moe_intermediate_size": 512, "num_shared_experts": 1},
        **{"first_k_dense_replace": 1, "use_qk_norm": True, "head_dim": 128},
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_equal_published_counts(name):
    stated, architecture, numbers = PUBLISHED[name]
    config = dict(zip(KEYS, numbers, strict=True))
    config = {key: value for key, value in config.items() if value is not None}
    if "num_layers" in MORE.get(name, {}):
        del config["num_hidden_layers"]
    config |= {"architectures": [architecture], **MORE.get(name, {})}
    model_type = {"OrionForCausalLM": "orion"}.get(architecture)
    config["model_type"] = model_type or FAMILIES[architecture].model_type
    config = canonical_config(config)
    family = FAMILIES[config["architectures"][0]].variant(config)
    sizes = family.sizes(config)
    shapes = family.tensors(config).values()
    count = sum(math.prod(size(names, sizes) for names in shape) for shape in shapes)
    assert count / 1e9 == pytest.approx(stated, rel=0.003)
