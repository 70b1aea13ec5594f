"""Refusals, by name, of models that a family cannot compute: in serving and quantizing."""

import pytest

from calibrate.float_model import FloatModel
from formats.errors import InputError
from qserve.llm import LLM
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import check_ranks
from tests.conftest import make_tiny
from tests.qserve.model.variants import edited
from tests.tiny_families import GEMMA, TINY_FAMILIES


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "glm4", "deepseek_v3"])
def test_float16_is_refused_where_activations_leave_its_range(model_of, name):
    with pytest.raises(InputError, match="--dtype float16.*--dtype bfloat16"):
        LLM(model_of(name), device="cpu", max_model_len=64, dtype="float16")


@pytest.mark.parametrize(
    "config_class, changed",
    [
        ("OPTConfig", {"do_layer_norm_before": False}),
        ("OPTConfig", {"word_embed_proj_dim": 32}),
        ("OPTConfig", {"layer_norm_elementwise_affine": False}),
        ("CohereConfig", {"use_qk_norm": True}),
        ("GPT2Config", {"scale_attn_by_inverse_layer_idx": True}),
        ("FalconConfig", {"alibi": True, "parallel_attn": True}),
        ("FalconConfig", {"parallel_attn": False}),
        (
            "FalconConfig",
            {"alibi": True, "parallel_attn": False, "new_decoder_architecture": True},
        ),
        ("OlmoeConfig", {"clip_qkv": 4.0}),
        (
            "Gemma4TextConfig",
            {**TINY_FAMILIES["gemma4_moe"][1], "hidden_size_per_layer_input": 16},
        ),
        ("Gemma4TextConfig", {"use_bidirectional_attention": "all"}),
    ],
)
def test_unsupported_variant_is_refused(tmp_path, config_class, changed):
    """Both by the server and before quantization."""
    usual = {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4}
    if config_class == "Gemma4TextConfig":
        usual = {**TINY_FAMILIES["gemma4"][1], "vocab_size_per_layer_input": 512}
    folder = make_tiny(tmp_path / "model", config_class, {**usual, **changed})
    key = "hidden_size_per_layer_input" if len(changed) > 3 else list(changed)[-1]
    refused = rf"config\.json {key}: expected .*, found .*not supported"
    with pytest.raises(InputError, match=refused):
        LLM(folder, device="cpu", max_model_len=64)
    with pytest.raises(InputError, match=refused):
        FloatModel(folder)


@pytest.mark.parametrize(
    "changed",
    [{"clip_qkv": 6.0}, {"alibi": False}, {"softmax_scale": 0.5}, {"alibi_bias_max": 16}],
)
def test_unsupported_mpt_variant_is_refused(model_of, tmp_path, changed):
    (key,) = changed
    folder = edited(
        model_of("mpt"), tmp_path / "x", config=lambda c: c["attn_config"].update(changed)
    )
    for read in (FloatModel, lambda folder: LLM(folder, device="cpu")):
        with pytest.raises(InputError, match=rf"attn_config\.{key}: expected .*not supported"):
            read(folder)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        *(("RWForCausalLM", "falcon-7b"), ("ChatGLMModel", "glm-4-9b")),
        ("Inkling2ForCausalLM", "four short convolutions"),
        ("DiffusionGemmaForBlockDiffusion", "by diffusion.*Gemma 4"),
        ("KimiK3ForConditionalGeneration", "attn_res_block_size"),
        ("MistralLarge4ForConditionalGeneration", "learned frequencies"),
        ("AXK2ForCausalLM", "gated_norm_rank.*A.X K1"),
        ("DeciLMForCausalLM", "block_configs"),
        ("Glm5NextForConditionalGeneration", "index_kpool"),
        ("HYV4ForCausalLM", "attention sinks in latent"),
        ("MllamaForConditionalGeneration", "cross-attention"),
        ("Molmo2ForConditionalGeneration", "pools patches"),
        ("MuseSparkForConditionalGeneration", "residual_gate_temperature"),
        ("Qwen4ExpForConditionalGeneration", "n-grams.*Qwen3.6"),
        ("ZayaForCausalLM", "convolutions over compressed"),
        ("Zamba2ForCausalLM", "shares blocks of attention"),
        ("DotsOCRForCausalLM", "vision part that is code in its folder"),
    ],
)
def test_architecture_is_refused_by_name(model_of, tmp_path, architecture, reason):
    folder = edited(
        model_of("gpt2"),
        tmp_path / "model",
        config=lambda config: config.update(architectures=[architecture]),
    )
    for read in (FloatModel, lambda folder: LLM(folder, device="cpu")):
        with pytest.raises(InputError, match=f"{architecture} .*{reason}"):
            read(folder)


def test_length_beyond_the_learned_positions_is_refused(model_of):
    with pytest.raises(InputError, match="max-model-len: expected 2 to 256"):
        LLM(model_of("opt"), device="cpu", max_model_len=257)


def test_bidirectional_gemma_is_refused(tmp_path):
    folder = make_tiny(
        tmp_path / "model", "Gemma3TextConfig", {**GEMMA, "use_bidirectional_attention": True}
    )
    with pytest.raises(InputError, match="use_bidirectional_attention"):
        LLM(folder, device="cpu", max_model_len=64)


@pytest.mark.parametrize("name", ["gemma4_shared", "gemma 4, shared keys"])
def test_layers_with_shared_kv_refuse_pipeline_stages(model_of, name):
    with pytest.raises(InputError, match="pipeline-parallel-size 2: .*Gemma4.*other stages"):
        check_ranks(ModelConfig.from_folder(model_of(name)), 1, 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vocab_size_per_layer_input": 500}, "vocab_size_per_layer_input: expected the 512"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers: layer 1 reads the keys .* sliding"),
    ],
)
def test_damaged_config_of_gemma_4_is_refused(model_of, tmp_path, changed, reason):
    folder = edited(model_of("gemma4_shared"), tmp_path / "x", config=lambda c: c.update(changed))
    with pytest.raises(InputError, match=reason):
        LLM(folder, device="cpu", max_model_len=64)
