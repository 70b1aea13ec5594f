"""Rows of current dense families."""

from dataclasses import replace

from formats.architecture.columns import ConfigRules, Norm
from formats.architecture.flags import Stated
from formats.architecture.rows.classic_parts import (
    ERNIE,
    GRANITE,
    GRANITE_SWA,
    HUNYUAN,
    HYPERCLOVA,
    NORMS_OF_ROTATED_HEADS,
    OLMO_1,
)
from formats.architecture.rows.gemma3n import GEMMA_3N
from formats.architecture.rows.gemma4 import GEMMA_4
from formats.architecture.rows.muse import MUSE_GLIMMER
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    BEFORE_ATTENTION,
    COHERE,
    GATE_UP,
    GEMMA,
    GEMMA_1,
    GEMMA_NORMS,
    HEAD_NORMS,
    LAYER_NORM,
    MISTRAL,
    MLP_BIAS,
    NORMS_AFTER,
    O_PROJ,
    OLMO,
    QKV,
    USUAL,
    norms_before,
    ungated,
)
from formats.architecture.rows.usual import family_row

DENSE = (
    family_row(
        "LlamaForCausalLM",
        "Llama",
        "llama",
        builder="llama",
        **ATTENTION_BIAS,
        **MLP_BIAS,
        rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
    ),
    family_row("MistralForCausalLM", "Mistral", "mistral", builder="llama", **MISTRAL),
    family_row(
        "MinistralForCausalLM",
        "Ministral",
        "ministral",
        builder="llama",
        **{**MISTRAL, "window": "layer_types"},
    ),
    family_row(
        "Ministral3ForCausalLM",
        "Ministral 3",
        "ministral3",
        builder="ministral3",
        window="all",
        rules=ConfigRules(defaults={"num_key_value_heads": 8, "head_dim": 128}),
    ),
    family_row(
        "Qwen2ForCausalLM",
        "Qwen2 and MiMo",
        "qwen2",
        builder="llama",
        qkv=replace(QKV, bias=True),
        draft_prefix="model.mtp_layers.",  # MiMo's
        window="layer_types",
        rules=ConfigRules(
            may_be_null=("num_key_value_heads", "head_dim"),
            defaults={"num_key_value_heads": 32},
        ),
    ),
    family_row(
        "Qwen3ForCausalLM",
        "Qwen3",
        "qwen3",
        builder="qwen3",
        **ATTENTION_BIAS,
        norms=(*USUAL["norms"], *HEAD_NORMS),
        window="layer_types",
        rules=ConfigRules(
            may_be_null=("num_key_value_heads",),
            defaults={"num_key_value_heads": 32, "head_dim": 128},
        ),
    ),
    family_row(
        "Phi3ForCausalLM",
        "Phi-3 and Phi-4",
        "phi3",
        builder="llama",
        qkv=replace(QKV, stored_fused=True),
        gate_up=replace(GATE_UP, stored_fused=True),
        window="all",
        rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
    ),
    family_row(
        "NanoChatForCausalLM",
        "nanochat",
        "nanochat",
        builder="hunyuan",
        **ATTENTION_BIAS,
        **ungated("mlp.fc1", "mlp.fc2", False),
        activations=("relu2",),
        norms=(*(replace(norm, feeds="") for norm in USUAL["norms"]), *NORMS_OF_ROTATED_HEADS),
        norm_weights=False,
        embedding_norm="model.norm.weight",  # the last norm, without weights, is also used first
        reversed_rope=True,
        logits_cap_key="final_logit_softcapping",
    ),
    family_row("GemmaForCausalLM", "Gemma", "gemma", builder="llama", **GEMMA_1),
    family_row(
        "Gemma2ForCausalLM", "Gemma 2", "gemma2", builder="gemma.gemma2", **GEMMA, norms=GEMMA_NORMS
    ),
    family_row(
        "Gemma3ForCausalLM",
        "Gemma 3 (text)",
        "gemma3_text",
        builder="gemma.gemma3",
        **GEMMA,
        norms=(*GEMMA_NORMS, *HEAD_NORMS),
    ),
    family_row(
        "Gemma3nForCausalLM",
        "Gemma 3n (text)",
        "gemma3n_text",
        builder="gemma.gemma3n",
        **GEMMA_3N,
    ),
    family_row(
        "Gemma4ForCausalLM", "Gemma 4 (text)", "gemma4_text", builder="gemma.gemma4", **GEMMA_4
    ),
    family_row(
        "GraniteForCausalLM",
        "Granite and MiniCPM",
        "granite",
        **GRANITE,
        **MLP_BIAS,
        rules=ConfigRules(may_be_null=("num_key_value_heads", "head_dim")),
    ),
    family_row(
        "GraniteSWAForCausalLM",
        "Granite with windows",
        "granite_swa",
        **{**GRANITE, **MLP_BIAS, **GRANITE_SWA},
    ),
    family_row(
        "HyperCLOVAXForCausalLM",
        "HyperCLOVA X",
        "hyperclovax",
        **HYPERCLOVA,
    ),
    family_row(
        "SmolLM3ForCausalLM",
        "SmolLM3",
        "smollm3",
        builder="llama",
        **ATTENTION_BIAS,
        **MLP_BIAS,
        window="layer_types",
        rope="no_rope_layers",
        tied=True,
        rules=ConfigRules(
            may_be_null=("num_key_value_heads", "head_dim"),
            defaults={"num_key_value_heads": 4},
        ),
    ),
    family_row("HunYuanDenseV1ForCausalLM", "Hunyuan", "hunyuan_v1_dense", **HUNYUAN),
    family_row(
        "SeedOssForCausalLM",
        "Seed-OSS",
        "seed_oss",
        builder="llama",
        qkv=replace(QKV, bias=Stated("attention_bias", True)),
        o=replace(O_PROJ, bias="attention_out_bias"),
        **MLP_BIAS,
        rules=ConfigRules(
            may_be_null=("num_key_value_heads", "head_dim"),
            defaults={"num_key_value_heads": 8, "head_dim": 128},
        ),
    ),
    family_row(
        "ArceeForCausalLM",
        "Arcee",
        "arcee",
        builder="llama",
        **ATTENTION_BIAS,
        **ungated("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        norms=norms_before("mlp.up_proj"),
        activations=("relu2",),
    ),
    family_row("Ernie4_5ForCausalLM", "ERNIE 4.5", "ernie4_5", builder="llama", **ERNIE),
    family_row("OlmoForCausalLM", "OLMo", "olmo", builder="llama", **OLMO_1),
    family_row("Olmo2ForCausalLM", "OLMo 2", "olmo2", builder="olmo2", **OLMO),
    family_row(
        "Olmo3ForCausalLM", "OLMo 3", "olmo3", builder="olmo2", **OLMO, window="layer_types"
    ),
    family_row(
        "Exaone4ForCausalLM",
        "EXAONE 4",
        "exaone4",
        builder="olmo2",
        norms=(*NORMS_AFTER, *HEAD_NORMS),
        window="layer_types",
        rope="windows",
        rules=ConfigRules(may_be_null=("head_dim",), defaults={"num_key_value_heads": 32}),
    ),
    family_row(
        "GlmForCausalLM",
        "GLM-4 9B (ChatGLM)",
        "glm",
        builder="llama",
        qkv=replace(QKV, bias=Stated("attention_bias", True)),
        gate_up=replace(GATE_UP, stored_fused=True),
        interleaved_rope=True,
        float16=False,
    ),
    family_row(
        "Glm4ForCausalLM",
        "GLM-4",
        "glm4",
        builder="glm4",
        qkv=replace(QKV, bias=Stated("attention_bias", True)),
        gate_up=replace(GATE_UP, stored_fused=True),
        norms=(
            *USUAL["norms"],
            Norm(name="post_self_attn_layernorm"),
            Norm(name="post_mlp_layernorm"),
        ),
        interleaved_rope=True,
        unread_layers_key="num_nextn_predict_layers",  # GLM-OCR: an MTP layer
        float16=False,
        rules=ConfigRules(defaults={"num_key_value_heads": 2, "head_dim": 128}),
    ),
    family_row(
        "CohereForCausalLM",
        "Cohere (Command R)",
        "cohere",
        builder="cohere",
        **COHERE,
        fixed={"use_qk_norm": False},
    ),
    family_row(
        "Cohere2ForCausalLM",
        "Cohere 2",
        "cohere2",
        builder="cohere",
        **COHERE,
        window="layer_types",
        rope="windows",
    ),
    family_row(
        "HeliumForCausalLM",
        "Helium",
        "helium",
        builder="llama",
        qkv=replace(QKV, bias="attention_bias"),
        **MLP_BIAS,
        interleaved_rope=True,
        float32_norms=True,
    ),
    family_row(
        "CwmForCausalLM",
        "CWM",
        "cwm",
        builder="llama",
        **MLP_BIAS,
        window="layer_types",
    ),
    family_row(
        "Jais2ForCausalLM",
        "Jais 2",
        "jais2",
        builder="llama",
        qkv=replace(QKV, bias=Stated("attention_bias", True)),
        o=replace(O_PROJ, bias=Stated("attention_bias", True)),
        **ungated("mlp.up_proj", "mlp.down_proj", Stated("mlp_bias", True)),
        norms=norms_before("mlp.up_proj"),
        **LAYER_NORM,
        activations=("relu2",),
    ),
    family_row(
        "VaultGemmaForCausalLM",
        "VaultGemma",
        "vaultgemma",
        builder="gemma.gemma2",
        **GEMMA,
        norms=(
            BEFORE_ATTENTION,
            Norm(name="pre_feedforward_layernorm", feeds=GATE_UP.name),
        ),
    ),
    family_row(
        "ApertusForCausalLM",
        "Apertus",
        "apertus",
        builder="apertus",
        **ATTENTION_BIAS,
        **ungated("mlp.up_proj", "mlp.down_proj", False),
        activations=("xielu",),
        activation_tensors={
            name: (f"mlp.act_fn.{name}", shape)
            for name, shape in (
                *(("alpha_p", (("one",),)), ("alpha_n", (("one",),))),
                *(("beta", ()), ("eps", ())),
            )
        },
        norms=(
            Norm(name="attention_layernorm", feeds=QKV.name),
            Norm(name="feedforward_layernorm", feeds="mlp.up_proj"),
            *HEAD_NORMS,
        ),
    ),
    family_row(
        "MuseGlimmerForCausalLM", "Muse Glimmer (text)", "muse_glimmer_text", **MUSE_GLIMMER
    ),
)
