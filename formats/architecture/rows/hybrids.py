"""Rows of families with recurrent layers."""

from dataclasses import replace

from formats.architecture.experts import SharedExpert
from formats.architecture.rows.parts import (
    HEAD_NORMS,
    NAMES,
    QWEN_DENSE,
    QWEN_HYBRID,
    QWEN_ROUTER,
    USUAL,
    experts,
    gated,
    norms_before,
)
from formats.architecture.rows.usual import family_row
from formats.architecture.states.inkling import INKLING
from formats.architecture.states.kimi import KIMI_LINEAR
from formats.architecture.states.lightning_ling import LING_2_6, RING_LINEAR
from formats.architecture.states.ling import LING_3
from formats.architecture.states.mamba import JAMBA, MAMBA, MAMBA_2
from formats.architecture.states.minimax import MINIMAX
from formats.architecture.states.olmo import OLMO_HYBRID
from formats.architecture.states.parts import (
    BAMBA,
    DELTA_NET,
    FALCON_H1,
    GRANITE_HYBRID,
    LFM2,
    LFM2_MOE,
    LFM3,
    NEMOTRON_H,
)

QWEN_SHARED = SharedExpert(
    **gated("mlp.shared_expert", *NAMES, "shared_expert_intermediate_size"),
    gate="mlp.shared_expert_gate",
)
HYBRIDS = (
    family_row(
        "Qwen3NextForCausalLM",
        "Qwen3-Next",
        "qwen3_next",
        builder="hybrid.qwen3_next",
        **QWEN_HYBRID,
        state_mixer=replace(
            DELTA_NET,
            inputs=replace(DELTA_NET.inputs, stored_fused=True),
            gates=replace(DELTA_NET.gates, stored_fused=True),
            grouped=True,
        ),
        experts=experts(
            "mlp",
            NAMES,
            "moe_intermediate_size",
            QWEN_ROUTER,
            shared=QWEN_SHARED,
            **QWEN_DENSE,
        ),
        norms=(*norms_before("mlp"), *HEAD_NORMS),
    ),
    family_row(
        "Qwen3_5ForCausalLM",
        "Qwen3.5 (text)",
        "qwen3_5_text",
        builder="hybrid.qwen3_next",
        **QWEN_HYBRID,
        state_mixer=DELTA_NET,
        norms=(*USUAL["norms"], *HEAD_NORMS),
    ),
    family_row(
        "Qwen3_5MoeForCausalLM",
        "Qwen3.5-MoE and Qwen3.6 (text)",
        "qwen3_5_moe_text",
        builder="hybrid.qwen3_next",
        **QWEN_HYBRID,
        inner_key="moe_intermediate_size",  # no layer has a dense feed-forward
        state_mixer=DELTA_NET,
        experts=experts(
            "mlp",
            NAMES,
            "moe_intermediate_size",
            replace(QWEN_ROUTER, normalized=True),
            shared=QWEN_SHARED,
        ),
        norms=(*norms_before("mlp"), *HEAD_NORMS),
    ),
    family_row("OlmoHybridForCausalLM", "OLMo-Hybrid", "olmo_hybrid", **OLMO_HYBRID),
    family_row("KimiLinearForCausalLM", "Kimi Linear", "kimi_linear", **KIMI_LINEAR),
    family_row("BailingHybridForCausalLM", "Ling 3", "bailing_hybrid", **LING_3),
    family_row(
        "BailingMoeV2_5ForCausalLM",
        "Ling/Ring 2.5 to 2.6",
        "bailing_hybrid",
        **LING_2_6,
    ),
    family_row(
        "BailingMoeLinearV2ForCausalLM", "Ring-linear 2", "bailing_moe_linear", **RING_LINEAR
    ),
    family_row("MiniMaxForCausalLM", "MiniMax-Text-01 and M1", "minimax", **MINIMAX),
    family_row("Lfm2ForCausalLM", "LFM2", "lfm2", builder="hybrid.lfm2", **LFM2),
    family_row("Lfm2MoeForCausalLM", "LFM2-MoE", "lfm2_moe", builder="hybrid.lfm2", **LFM2_MOE),
    family_row("Lfm3ForCausalLM", "LFM3", "lfm3", builder="hybrid.lfm2", **LFM3),
    family_row("InklingForCausalLM", "Inkling (text)", "inkling_text", **INKLING),
    family_row(
        "GraniteMoeHybridForCausalLM",
        "Granite 4 (hybrid)",
        "granitemoehybrid",
        builder="hybrid.granite",
        **GRANITE_HYBRID,
    ),
    family_row(
        "FalconH1ForCausalLM", "Falcon-H1", "falcon_h1", builder="hybrid.falcon_h1", **FALCON_H1
    ),
    family_row("BambaForCausalLM", "Bamba", "bamba", builder="hybrid.bamba", **BAMBA),
    family_row(
        "NemotronHForCausalLM",
        "Nemotron-H and Nemotron 3",
        "nemotron_h",
        builder="hybrid.nemotron_h",
        **NEMOTRON_H,
    ),
    family_row("MambaForCausalLM", "Mamba", "mamba", **MAMBA),
    family_row("FalconMambaForCausalLM", "FalconMamba", "falcon_mamba", **MAMBA),
    family_row("Mamba2ForCausalLM", "Mamba 2", "mamba2", **MAMBA_2),
    family_row("JambaForCausalLM", "Jamba", "jamba", **JAMBA),
)
