"""Families whose layers have states: logits and greedy tokens are transformers', wrong readings are
seen, and slots of states go from request to request."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.errors import InputError
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme
from qkernels.causal_conv.state import StateSlots
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.model.test_expert_names import stacked
from tests.qserve.model.test_family_tokens import check_greedy, count_preemptions
from tests.qserve.model.test_transformers import dense
from tests.qserve.model.variants import TOKENS, edited, logits, relative
from tests.tiny_families import DELTA, MAMBA, SHORT_CONV, TINY_FAMILIES

DELTA_NETS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
MAMBAS = ["granite_hybrid", "granite_hybrid_moe", "falcon_h1", "nemotron_h", "nemotron_h_moe"]
MAMBAS += ["bamba", "mamba", "falcon_mamba", "mamba2", "jamba"]
FAMILIES = [
    *DELTA_NETS,
    "olmo_hybrid",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "inkling",
    *MAMBAS,
    "kimi_linear",
    "ling_3",
    "minimax",
]
# what real checkpoints have that the usual tiny models have not
VARIANTS = {
    "qwen 3.5 with biases, two taps, tied": (
        "Qwen3_5TextConfig",
        {
            **DELTA,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "linear_conv_kernel_dim": 2,
            "layer_types": None,
            "full_attention_interval": 3,
        },
    ),
    "olmo-hybrid that rotates and writes at most once": (
        "OlmoHybridConfig",
        {
            **TINY_FAMILIES["olmo_hybrid"][1],
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
            **{"linear_allow_neg_eigval": False, "attention_bias": True},
            **{"tie_word_embeddings": True, "linear_num_key_heads": 4, "rms_norm_eps": 1e-3},
        },
    ),
    "lfm2 with biases, two taps, as published": (
        "Lfm2Config",
        {
            **SHORT_CONV,
            "conv_bias": True,
            "conv_L_cache": 2,
            "layer_types": None,
            "full_attn_idxs": [1],
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm3 without gates and norms of branches": (
        "Lfm3Config",
        {
            **{**TINY_FAMILIES["lfm3"][1], "use_attention_gate": False, "conv_bias": True},
            **{"use_sandwich_norm": False, "tie_word_embeddings": False, "layer_types": None},
        },
    ),
    "granite 4 with rotations and biases": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"shared_intermediate_size": 64, "num_local_experts": 0, "mamba_d_conv": 2},
            **{"mamba_n_groups": 1, "mamba_d_head": "auto", "time_step_limit": [0.2, 0.9]},
            **{"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            **{"position_embedding_type": "rope", "tie_word_embeddings": True},
        },
    ),
    "falcon-h1 without norm and factors, with biases": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": 128, "mamba_rms_norm": False, "mlp_bias": True},
            **{"projectors_bias": True, "mlp_multipliers": [1.6, 0.5]},
        },
    ),
    "falcon-h1, norm first": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_conv_bias": False},
        },
    ),
    "nemotron-h with biases, its smallest steps": (
        "NemotronHConfig",
        {
            **TINY_FAMILIES["nemotron_h"][1],
            **{"use_bias": True, "mlp_bias": True, "time_step_min": 0.7},
        },
    ),
    "bamba with biases, three layers with attention": (
        "BambaConfig",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"attn_layer_indices": [0, 1, 3], "num_hidden_layers": 4, "mamba_d_head": "auto"},
            **{"attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
            **{"mlp_bias": True, "time_step_limit": [0.2, 0.9], "tie_word_embeddings": True},
        },
    ),
    "nemotron 3, one group, all kinds of layers": (
        "NemotronHConfig",
        {
            **TINY_FAMILIES["nemotron_h_moe"][1],
            **{"n_group": 1, "topk_group": 1, "mlp_bias": True, "norm_topk_prob": False},
            "layers_block_type": ["moe", "full_attention", "mlp", "linear_attention", "moe"],
        },
    ),
    "qwen3-next without experts, all of a head rotates": (
        "Qwen3NextConfig",
        {
            **TINY_FAMILIES["qwen3_next"][1],
            "mlp_only_layers": [0, 1, 2],
            "linear_num_key_heads": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 100.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
}
VARIANTS["nemotron 3 with a latent"] = TINY_FAMILIES["nemotron_h_latent"]
FEW_PAGES = {"num_gpu_blocks_override": 9, "admission": "fits", "block_size": 8, "max_num_seqs": 4}
MODES = {
    "whole": {},
    "chunked and preempted": {**FEW_PAGES, "max_num_batched_tokens": 11},
    "chunked": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
}


def in_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompts(seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(n)] for n in (9, 17, 26, 30, 12, 1)]


def greedy(llm, prompts, num_tokens=10):
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    return llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS])
def test_logits_equal_transformers(hybrid, name):
    folder = hybrid(name)
    with torch.no_grad():
        want = in_transformers(folder)(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5


@pytest.mark.parametrize(
    ("name", "scheme", "output_format"),
    [
        ("qwen3_5", "w4a16-sym-g32", "compressed-tensors"),
        ("qwen3_5_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("olmo_hybrid", "w4a16-sym-g32", "gptq"),
        ("lfm2", "w4a16-sym-g32", "gptq"),
        ("lfm2_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("granite_hybrid", "w4a16-sym-g32", "gptq"),
        ("falcon_h1", "w4a16-sym-g32", "gptq"),
        ("granite_hybrid_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("nemotron_h", "w4a16-sym-g32", "gptq"),
        ("nemotron_h_moe", "w4a16-sym-g32", "compressed-tensors"),
        ("nemotron_h_latent", "w4a16-sym-g32", "compressed-tensors"),
        ("bamba", "w4a16-sym-g32", "gptq"),
        ("kimi_linear", "w4a16-sym-g32", "compressed-tensors"),
        ("ling_3", "w4a16-sym-g32", "gptq"),
        ("minimax", "w4a16-sym-g32", "compressed-tensors"),
        ("lfm3", "w4a16-sym-g32", "gptq"),
        ("falcon_mamba", "w4a16-sym-g32", "compressed-tensors"),
        ("jamba", "w4a16-sym-g32", "gptq"),
        pytest.param("mamba", "w4a16-sym-g32", "awq", marks=pytest.mark.exhaustive),
        pytest.param("mamba2", "w4a16-sym-g32", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_next", "w4a16-sym-g32", "gptq", marks=pytest.mark.exhaustive),
        pytest.param("qwen3_5", "w4a16-asym-g32", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_quantized_tokens_equal_dequantized(written, tmp_path, name, scheme, output_format):
    """Logits and tokens: whole, and with chunks and preemptions."""
    folder = written(scheme, output_format, name)
    model = in_transformers(dense(folder, tmp_path / "dense", torch.float32))
    with torch.no_grad():
        want = model(torch.tensor([TOKENS])).logits[0]
    assert relative(logits(folder), want) < 1e-5
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES["chunked and preempted"])
    check_greedy(model, prompts(), greedy(llm, prompts()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in VARIANTS)],
)
def test_greedy_tokens_equal_transformers(hybrid, monkeypatch, name, mode):
    folder = hybrid(name)
    llm = LLM(folder, device="cpu", max_model_len=64, **MODES[mode])
    poison(llm)
    preemptions = count_preemptions(llm, monkeypatch)
    outputs = greedy(llm, prompts())
    assert bool(preemptions) == ("num_gpu_blocks_override" in MODES[mode])
    states = llm.engine.scheduler.states
    assert states.num_free == states.num_slots
    check_greedy(in_transformers(folder), prompts(), outputs)


def poison(llm):
    """Fill the caches with NaN, so that reading an unwritten value is visible."""
    for cache in llm.engine.runner.caches:
        for tensor in cache.slot_tensors:
            tensor.fill_(torch.nan)


def test_state_slot_is_reused(hybrid):
    """One after the other in one slot, and after one that was aborted amid its prompt."""
    folder = hybrid("qwen3_5")
    llm = LLM(folder, device="cpu", max_model_len=64, max_num_seqs=1, max_num_batched_tokens=5)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    assert engine.scheduler.states.num_slots == 1
    engine.add_request("gone", [7] * 30, params)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.states.num_free == 0
    engine.abort("gone")
    assert engine.scheduler.states.num_free == 1
    check_greedy(in_transformers(folder), prompts(5), greedy(llm, prompts(5)))
    engine.scheduler.check_integrity()


def test_logits_call_keeps_states(hybrid):
    llm = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64)
    poison(llm)
    llm.logits(TOKENS)
    states = [c for c in llm.engine.runner.caches if isinstance(c, StateSlots)]
    assert len(states) == 2 and all(each.memory_PHKV.isnan().all() for each in states)
    assert all(each.conv_PCL.isnan().all() for each in states)


def test_bad_words_wait_for_last_token_only_with_states(hybrid):
    """As rows are whose masks come late: those of such requests wait for the token before."""
    params = SamplingParams(
        bad_words=("x",), bad_words_token_ids=((5, 6),), max_tokens=4, detokenize=False
    )
    for name, waits in (("qwen3_5", True), ("qwen3", False)):
        engine = LLM(hybrid(name), device="cpu", max_model_len=64).engine
        engine.add_request("a", TOKENS, params)
        assert engine._requests["a"].follows_last == waits


def test_disabled_snapshots_disable_prefix_hits_and_are_logged(hybrid, caplog):
    with caplog.at_level("INFO"):
        llm = LLM(
            hybrid("qwen3_5"), device="cpu", max_model_len=64, block_size=8, num_state_snapshots=0
        )
    assert "Prefix cache: off (the model has states; set --num-state-snapshots)" in caplog.text
    start = TOKENS * 3
    first, second = (greedy(llm, [start])[0].outputs[0].token_ids for _ in range(2))
    assert first == second and not llm.engine.scheduler.pool.num_cached


def test_pages_hold_only_attention_layers(hybrid):
    runner = LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64).engine.runner
    # one layer of 16 tokens, 2 KV heads of 32, keys and values in float32
    assert runner.bytes_per_page == 16 * 2 * 32 * 2 * 4
    states = [cache for cache in runner.caches if isinstance(cache, StateSlots)]
    held = sum(each.conv_PCL.nbytes + each.memory_PHKV.nbytes for each in states)
    assert runner.bytes_of_states == held > 0


LIMITS = [
    ({"cpu_kv_cache_memory": 1e-5}, "cpu-kv-cache-memory.*do not hold the states.*max-num-seqs"),
]


@pytest.mark.parametrize(("settings", "message"), LIMITS, ids=[m.split(".")[0] for _, m in LIMITS])
def test_settings_unsupported_with_states_are_refused(hybrid, settings, message):
    with pytest.raises(InputError, match=f"--{message}"):
        LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **settings)


def test_drafter_with_states_is_refused(hybrid, tiny_model, tmp_path):
    """Drafts are run ahead of the text, which its states cannot undo."""
    folders = []
    for name in ("qwen3_5", "qwen2"):
        folder = edited(
            hybrid("qwen3_5") if name == "qwen3_5" else tiny_model(name), tmp_path / name
        )
        vocabulary = {f"t{token}": token for token in range(512)}
        tokenizer = {"model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"}}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        folders.append(folder)
    config = {"method": "draft_model", "model": str(folders[0]), "num_speculative_tokens": 2}
    with pytest.raises(InputError, match="without recurrent states, found Qwen3_5ForCausalLM"):
        LLM(folders[1], device="cpu", max_model_len=64, speculative_config=json.dumps(config))


def test_pages_for_other_engines_need_snapshots(hybrid, tmp_path):
    extra = {"path": str(tmp_path)}
    config = {"kv_connector": "folder", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    settings = {"kv_transfer_config": json.dumps(config), "num_state_snapshots": 0}
    with pytest.raises(InputError, match="kv-transfer-config with --num-state-snapshots 0"):
        LLM(hybrid("qwen3_5"), device="cpu", max_model_len=64, **settings)


def test_mtp_layers_are_not_loaded(hybrid, tmp_path):
    """Qwen3.5 is published with a layer that predicts the token after the next."""
    source = hybrid("qwen3_5")
    extra = {"mtp.layers.0.input_layernorm.weight": torch.ones(64)}
    extra["mtp.fc.weight"] = torch.ones(64, 128)
    folder, quantized = edited(source, tmp_path / "x", lambda s: s.update(extra)), tmp_path / "q"
    assert torch.equal(logits(folder), logits(source))
    scheme = Scheme.parse("w4a16-sym-g32")
    quantize_checkpoint(folder, quantized, scheme=scheme, recipe="rtn", progress=False)
    reader = CheckpointReader(quantized)
    assert torch.equal(reader.get("mtp.fc.weight"), extra["mtp.fc.weight"])
    assert QuantConfig.from_dict(reader.config[BLOCK]).scheme_for("mtp.fc") is None
    assert logits(quantized).isfinite().all()


@pytest.mark.parametrize(
    ("name", "wrapper"), [("qwen3_5", "Qwen3_5"), ("qwen3_5_moe", "Qwen3_5Moe")]
)
def test_text_model_of_vision_language_checkpoint(hybrid, tmp_path, name, wrapper):
    """As Qwen3.5 is published: names below model.language_model, the config in text_config."""
    source = hybrid(name)

    def tensors(state):
        if wrapper == "Qwen3_5Moe":
            stacked(state)  # Qwen3.6 has one tensor for all experts
        for key in [key for key in state if key.startswith("model.")]:
            state[key.replace("model.", "model.language_model.", 1)] = state.pop(key)
        state["model.visual.blocks.0.norm1.weight"] = torch.ones(3)

    def config(value):
        text = {**value}
        del text["architectures"]
        value.clear()
        value.update(
            architectures=[f"{wrapper}ForConditionalGeneration"],
            model_type=name,
            text_config=text,
            dtype="float32",
        )

    folder = edited(source, tmp_path / "x", tensors, config)
    assert torch.equal(logits(folder), logits(source))


def test_heads_that_do_not_divide_are_refused(hybrid, tmp_path):
    folder = edited(
        hybrid("qwen3_5"), tmp_path / "x", config=lambda c: c.update(linear_num_key_heads=3)
    )
    with pytest.raises(InputError, match="linear_num_value_heads.*multiple of.*3, found 4"):
        logits(folder)
