"""Rows of families with latent attention."""

from formats.architecture.rows.deepseek_v4 import DEEPSEEK_V4
from formats.architecture.rows.dots import DOTS_3
from formats.architecture.rows.latent_parts import (
    AXK_1,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GLM_LITE,
    MINICPM_3,
    MISTRAL_4,
    YOUTU,
)
from formats.architecture.rows.usual import family_row

LATENT = (
    family_row("DeepseekV2ForCausalLM", "DeepSeek-V2", "deepseek_v2", **DEEPSEEK_V2),
    family_row(
        "DeepseekV3ForCausalLM",
        "DeepSeek-V3 (R1, Moonlight, Kimi-K2)",
        "deepseek_v3",
        **DEEPSEEK_V3,
    ),
    family_row("DeepseekV32ForCausalLM", "DeepSeek-V3.2", "deepseek_v32", **DEEPSEEK_V32),
    family_row("DeepseekV4ForCausalLM", "DeepSeek-V4", "deepseek_v4", **DEEPSEEK_V4),
    family_row("Dots3NoteForCausalLM", "dots3-note (text)", "dots3_note_text", **DOTS_3),
    family_row("GlmMoeDsaForCausalLM", "GLM-5", "glm_moe_dsa", **GLM_5),
    family_row("Glm4MoeLiteForCausalLM", "GLM-4.7-Flash", "glm4_moe_lite", **GLM_LITE),
    family_row("AXK1ForCausalLM", "A.X K1", "axk1", **AXK_1),
    family_row("YoutuForCausalLM", "Youtu-LLM", "youtu", **YOUTU),
    family_row("MiniCPM3ForCausalLM", "MiniCPM3", "minicpm3", **MINICPM_3),
    family_row("Mistral4ForCausalLM", "Mistral 4 (text)", "mistral4", **MISTRAL_4),
)
