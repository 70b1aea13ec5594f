"""Rows of OPT, GPT and other older families."""

from dataclasses import replace

from formats.architecture.columns import Positions
from formats.architecture.rows.classic_parts import (
    BLOOM,
    FALCON,
    GPT2,
    GPT_BIGCODE,
    GPT_J,
    MPT,
)
from formats.architecture.rows.parts import (
    ATTENTION_BIAS,
    GPT_NEOX,
    O_PROJ,
    OPT,
    PHI,
    QKV,
    STABLELM,
    STARCODER_BIAS,
    norms_before,
    ungated,
)
from formats.architecture.rows.usual import family_row

CLASSICS = (
    family_row(
        "OPTForCausalLM",
        "OPT",
        "opt",
        builder="opt",
        **OPT,
        norm_kind="layer",
        norm_bias=True,
        norm_eps_key="",
        activation_key="activation_function",
        activations=("relu", "gelu"),
        inner_key="ffn_dim",
        rope="none",
        positions=Positions(name="model.decoder.embed_positions.weight", offset=2),
        tied=True,
        fixed={
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        like_hidden_size=("word_embed_proj_dim",),
        layer="model.decoder.layers.{i}",
        embedding="model.decoder.embed_tokens.weight",
        last_norm="model.decoder.final_layer_norm.weight",
    ),
    family_row("StableLmForCausalLM", "StableLM", "stablelm", builder="llama", **STABLELM),
    family_row("PhiForCausalLM", "Phi", "phi", builder="cohere", **PHI),
    family_row(
        "GPTNeoXForCausalLM", "GPT-NeoX (Pythia)", "gpt_neox", builder="gpt_neox", **GPT_NEOX
    ),
    family_row("GPT2LMHeadModel", "GPT-2", "gpt2", builder="gpt2", **GPT2),
    family_row(
        "GPTBigCodeForCausalLM",
        "GPT-BigCode (StarCoder)",
        "gpt_bigcode",
        builder="gpt2",
        **GPT_BIGCODE,
    ),
    family_row("GPTJForCausalLM", "GPT-J", "gptj", builder="gpt2", **GPT_J),
    family_row("BloomForCausalLM", "BLOOM", "bloom", builder="gpt2", **BLOOM),
    family_row("MptForCausalLM", "MPT", "mpt", builder="gpt2", **MPT),
    family_row("FalconForCausalLM", "Falcon", "falcon", builder="falcon", **FALCON),
    family_row(
        "Starcoder2ForCausalLM",
        "StarCoder 2",
        "starcoder2",
        builder="llama",
        qkv=replace(QKV, bias=STARCODER_BIAS),
        o=replace(O_PROJ, bias=STARCODER_BIAS),
        **ungated("mlp.c_fc", "mlp.c_proj", STARCODER_BIAS),
        norms=norms_before("mlp.c_fc"),
        norm_kind="layer",
        norm_bias=True,
        norm_eps_key="norm_epsilon",
        activations=("gelu_pytorch_tanh", "gelu", "gelu_new"),
        window="all",
        tied=True,
    ),
    family_row(
        "NemotronForCausalLM",
        "Nemotron",
        "nemotron",
        builder="llama",
        **ATTENTION_BIAS,
        **ungated("mlp.up_proj", "mlp.down_proj", "mlp_bias"),
        norms=norms_before("mlp.up_proj"),
        norm_kind="layer",
        norm_bias=True,
        norm_offset=1.0,
        norm_eps_key="norm_eps",
        activations=("relu2",),
    ),
)
