"""Models for the tests: the bundled one, its quantized form, tiny random ones of each family."""

import os
import re
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.codecs import gptq
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import Scheme

ROOT = Path(__file__).resolve().parent.parent

if "OMP_NUM_THREADS" not in os.environ:
    # Workers that each compute on all cores wait for each other; so do the processes they start.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """A worker more than cores: where a test waits for a server, its core has another to run."""
    return (yield) + 1


@pytest.fixture(scope="session", autouse=True)
def kernels_compile_where_they_are_launched():
    """Workers that each start a compile process for every core would wait for each other."""
    if not torch.cuda.is_available():
        yield
        return
    from qkernels.gpu import compile_pool

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_pool, "MAX_WORKERS", 0)
        yield


TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 2,
    # Larger than usual: the outputs of a random model then differ from token to token.
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
GEMMA = {
    "head_dim": 16,
    "sliding_window": 9,
    # not head_dim, so that the one is not taken for the other
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
}
# their own names of the sizes; a width of the feed-forward that is not 4 times the hidden size
GPT = {
    **{"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256, "n_inner": 96},
    "num_key_value_heads": 4,
}
FALCON = {"ffn_hidden_size": 96, "tie_word_embeddings": True}
NEOX = {"hidden_act": "gelu", "num_key_value_heads": 4}
# family -> config class and what it adds; windows shorter than the prompts, so that they matter
TINY_FAMILIES = {
    "llama": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "mistral": ("MistralConfig", {"sliding_window": 9}),
    "ministral": (
        "MinistralConfig",
        {
            "head_dim": 32,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.6,
            },
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True}),
    "phi3": ("Phi3Config", {"pad_token_id": 0}),
    "gemma2": (
        "Gemma2Config",
        # scores and logits of a tiny model are small: with the usual caps nothing bends
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True, "pad_token_id": 0},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 32}),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0}),
    "olmo3": (
        "Olmo3Config",
        {
            "pad_token_id": 0,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "exaone4": ("Exaone4Config", {"sliding_window": 9, "sliding_window_pattern": 3}),
    "glm4": (
        "Glm4Config",
        {"head_dim": 32, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "swiglu_limit": 0.5,
            "pad_token_id": 0,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.8,
            "pad_token_id": 0,
        },
    ),
}

# Four value heads to two key heads, each kind with a width of its own; a gate for each head.
DELTA = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Latent attention: widths that differ from each other.
LATENT = {
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 40},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3},
    **{"moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1},
}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0},
    **{"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 0.8},
}
TINY_FAMILIES |= {
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {
            **DELTA,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 96, "word_embed_proj_dim": 64, "num_key_value_heads": 4, "init_std": 0.2},
    ),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
    "gemma": ("GemmaConfig", {"head_dim": 16, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True}),
    "phi": ("PhiConfig", {"intermediate_size": 128}),
    "gpt_neox": ("GPTNeoXConfig", {**NEOX, "rotary_pct": 0.5, "initializer_range": 0.3}),
    "nemotron": ("NemotronConfig", {}),
    "gpt2": ("GPT2Config", {**GPT, "tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT, "tie_word_embeddings": True}),
    "gptj": ("GPTJConfig", {**GPT, "rotary_dim": 8}),
    "falcon": ("FalconConfig", FALCON),
    "arcee": ("ArceeConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 32, "use_bias": True}),
    "glm": ("GlmConfig", {"head_dim": 32, "pad_token_id": 0}),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32},
            **{"moe_layer_start_index": 1, "tie_word_embeddings": True},
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1Config",
        {
            "head_dim": 32,
            "rope_parameters": {
                **{"rope_type": "dynamic", "rope_theta": 10000.0},
                **{"alpha": 50.0, "factor": 1.0},
            },
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {"head_dim": 32, "rotary_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "dots1": (
        "Dots1Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.8,
        },
    ),
    # queries of their own, one group
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.8,
            "rope_parameters": YARN,
        },
    ),
    # latents of queries, groups, the factor of YaRN twice
    "deepseek_v3": (
        "DeepseekV3Config",
        {**LATENT, **GROUPS, "q_lora_rank": 96, "rope_parameters": YARN},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**LATENT, "q_lora_rank": 96, "n_group": 1, "topk_group": 1, "pad_token_id": 0},
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "cohere2": (
        "Cohere2Config",
        {
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
# Short convolutions of three taps; the width of the feed-forward is adjusted from the stated one.
SHORT_CONV = {
    "layer_types": ["conv", "full_attention", "conv"],
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
TINY_FAMILIES |= {
    "lfm2": (
        "Lfm2Config",
        {**SHORT_CONV, "intermediate_size": 128, "block_multiple_of": 32},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **SHORT_CONV,
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.8,
        },
    ),
}
# Mamba-2 with two groups; widths of states and of heads that differ.
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 22},
    **{"mamba_chunk_size": 16, "layer_types": ["mamba", "attention", "mamba"]},
}
TINY_FAMILIES |= {
    "granite_hybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"shared_intermediate_size": 96, "num_local_experts": 0},
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
        },
    ),
    "granite_hybrid_moe": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            **{"intermediate_size": 32, "shared_intermediate_size": 96},
            **{"num_local_experts": 6, "num_experts_per_tok": 2},
            **{"residual_multiplier": 0.4, "attention_multiplier": 0.1},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 22},
            **{"head_dim": 32, "chunk_size": 16, "num_hidden_layers": 4},
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{name: value for name, value in MAMBA.items() if name != "layer_types"},
            **{"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.6},
            **{"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.7},
            **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.8},
            **{"ssm_multipliers": [0.7, 1.2, 0.6, 1.4, 0.9], "mlp_multipliers": [1.6, 0.5]},
        },
    ),
}
GRANITE_MOE = {
    **{"num_local_experts": 6, "num_experts_per_tok": 3, "logits_scaling": 2.5},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1},
}
TINY_FAMILIES |= {
    "granite_moe": ("GraniteMoeConfig", GRANITE_MOE),
    "granite_moe_shared": (
        "GraniteMoeSharedConfig",
        {**GRANITE_MOE, "shared_intermediate_size": 64, "tie_word_embeddings": True},
    ),
    # sizes that no key of theirs states
    "bloom": ("BloomConfig", {"tie_word_embeddings": True}),
    "mpt": ("MptConfig", {"tie_word_embeddings": True, "max_seq_len": 256}),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"head_dim": 32, "num_local_experts": 6, "intermediate_size_mlp": 128},
            **{"moe_layers": [0, 1], "no_rope_layer_interval": 2, "attention_chunk_size": 11},
            **{"floor_scale": 4, "attn_scale": 0.5},
        },
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1},
            **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 9},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            **{"tie_word_embeddings": True, "final_logit_softcapping": 3.0},
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1Config", {"head_dim": 32, "num_experts": 6, "moe_topk": 2}),
}
# rows of what other families have, too: a few tests run them
ROWS = ("gpt_bigcode", "arcee", "ernie4_5", "ernie4_5_moe", "glm", "hunyuan", "olmoe", "dots1")
ROWS += ("granite_moe_shared", "hunyuan_moe")
# families whose layers have states
STATES = (
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"),
    *("granite_hybrid", "granite_hybrid_moe", "falcon_h1", "nemotron_h"),
)
WITHOUT_RANKS = (*STATES, "gemma4")  # ranks are refused
WITHOUT_ADAPTERS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")  # latent attention


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive", action="store_true", help="also what is marked exhaustive: all parameters"
    )
    parser.addoption(
        "--exhaustive-part",
        metavar="I/N",
        help="of what is marked exhaustive, the I-th of N parts, counted from 0",
    )
    parser.addoption(
        "--all-cards",
        action="store_true",
        help="compile every case for every card (tests/qkernels/compile); takes 20 minutes",
    )
    group = parser.getgroup("fuzz", "tests/qkernels/fuzz/test_kernels.py")
    group.addoption("--fuzz-seconds", type=float, default=4, help="how long it draws problems")
    group.addoption("--fuzz-seed", type=int, default=0, help="what it draws them from")
    group.addoption("--fuzz-replay", help="one problem, as a failure prints it")


def pytest_collection_modifyitems(config, items):
    """A GPU runs everything: its exhaustive tests take seconds there."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # not its keywords: folders and parameters are named so
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
    part = config.getoption("--exhaustive-part")
    if part or not config.getoption("--exhaustive"):
        left_out = [
            item
            for item in items
            if item.get_closest_marker("exhaustive") and not (part and is_in_part(item, part))
        ]
        config.hook.pytest_deselected(items=left_out)
        dropped = set(left_out)
        items[:] = [item for item in items if item not in dropped]


def is_in_part(item: pytest.Item, part: str) -> bool:
    """Return True if the test is in part "I/N". Equal parameters of a file share fixtures, so they
    are in the same part.
    """
    number, count = map(int, part.split("/"))
    parameters = item.nodeid.partition("[")[2] or item.nodeid
    return zlib.crc32(f"{item.path.name} {parameters}".encode()) % count == number


@pytest.fixture(scope="session")
def docs_5m() -> Path:
    """The bundled float model."""
    return ROOT / "examples" / "models" / "docs-5m"


@pytest.fixture(scope="session")
def quantized_5m(docs_5m, tmp_path_factory) -> Path:
    """The bundled model as `qserve quantize --scheme w4a16-sym` writes it."""
    folder = tmp_path_factory.mktemp("models") / "docs-5m-w4a16"
    quantize_checkpoint(docs_5m, folder, scheme=Scheme.parse("w4a16-sym"), progress=False)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """family -> folder of a tiny random float model, made once."""
    made = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(
                tmp_path_factory.mktemp("tiny") / family, *TINY_FAMILIES[family]
            )
        return made[family]

    return make


def make_tiny(folder: Path, config_class: str, extra: dict) -> Path:
    """Write a tiny random float model."""
    import transformers

    config = getattr(transformers, config_class)(**{**TINY, **extra})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name or "sinks" in name:
            # Some families' norms multiply by 1 + weight.
            adds_one = config_class.startswith(("Gemma", "Qwen3Next", "Qwen3_5", "NemotronC"))
            adds_one &= not config_class.startswith("Gemma4")
            is_norm = "norm" in name and "bias" not in name
            is_one = is_norm and (not adds_one or "linear_attn" in name)
            torch.nn.init.normal_(parameter, float(is_one), 0.2)
        if name.endswith(".D"):
            torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias", "layer_scalar")):
            torch.nn.init.normal_(buffer, float(name.endswith("scalar")), 0.2)
    if config.tie_word_embeddings and "Qwen" not in config_class:
        # A head that is the embedding says the last token again where embeddings are large.
        with torch.no_grad():
            model.get_input_embeddings().weight.div_(16)
    model.save_pretrained(folder)
    return folder


# names in files that transformers changes as it loads them
STORED_NAMES = {
    **{"embed_out.": "lm_head.", ".mlp.moe_statics.": ".mlp.gate.moe_statics."},
    **{"backbone.": "model.", ".router.layer.": ".router."},
}
# model_type -> what its modules call `mlp`
MLP_NAMES = {"granitemoe": "block_sparse_moe", "granitemoeshared": "block_sparse_moe"}
MLP_NAMES["llama4_text"] = "feed_forward"


def module_name(name: str) -> str:
    """Name in transformers' modules of a tensor of a file."""
    for stored, own in STORED_NAMES.items():
        name = name.replace(stored, own)
    return name


EXPERT = re.compile(r"(.*\.(?:mlp|block_sparse_moe|feed_forward))\.experts\.(\d+)\.(\w+)\.weight")


def with_stacked_experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers' modules have them: a tensor for all of a layer, by one name."""
    found: dict[str, dict[tuple[int, str], torch.Tensor]] = {}
    rest = {}
    for name, tensor in state.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            is_granite = ".router.layer." in name
            own = name if is_granite else name.replace(".block_sparse_moe.", ".mlp.")
            rest[own.replace(".router.layer.", ".router.")] = tensor
        else:
            is_mixtral = match[3].startswith("w") and "block_sparse_moe" in match[1]
            module = match[1].replace(".block_sparse_moe", ".mlp") if is_mixtral else match[1]
            found.setdefault(module, {})[int(match[2]), match[3]] = tensor
    for module, each in found.items():
        is_short = (0, "w1") in each
        gate, up, down = ("w1", "w3", "w2") if is_short else ("gate_proj", "up_proj", "down_proj")
        numbers = range(len(each) // 3)
        both = [torch.cat([each[number, gate], each[number, up]]) for number in numbers]
        rest[f"{module}.experts.gate_up_proj"] = torch.stack(both)
        rest[f"{module}.experts.down_proj"] = torch.stack([each[n, down] for n in numbers])
    return rest


@pytest.fixture(scope="session")
def transformers_model():
    """folder -> transformers' model in float32, with quantized linears dequantized."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def load(folder: Path):
        reader = CheckpointReader(folder)
        raw = dict(reader.config)
        block = raw.pop(BLOCK, None)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(raw.pop("model_type"), **raw), dtype=torch.float32
        )
        state = {}
        for name in reader.entries:
            module, _, leaf = name.rpartition(".")
            if leaf == "qweight":
                tensors = {n: reader.get(f"{module}.{n}") for n in gptq.TENSOR_NAMES}
                spec = QuantConfig.from_dict(block).scheme.weight
                weight = gptq.decode(tensors, spec).dequantize()
                state[module_name(f"{module}.weight")] = weight
            elif leaf not in gptq.TENSOR_NAMES:
                state[module_name(name)] = reader.get(name)
        if reader.config["model_type"] == "gpt2":  # Conv1D's weights are [inputs, outputs]
            for name in state:
                if re.fullmatch(r".*\.h\.\d+\.(attn|mlp)\.c_\w+\.weight", name):
                    state[name] = state[name].T
        own = MLP_NAMES.get(reader.config["model_type"], "mlp")
        state = {name.replace(f".{own}.", ".mlp."): tensor for name, tensor in state.items()}
        state = with_stacked_experts(state)
        if own == "feed_forward":  # [experts, inputs, outputs]
            state = {name: x.mT if ".experts." in name else x for name, x in state.items()}
        state = {name.replace(".mlp.", f".{own}."): tensor for name, tensor in state.items()}
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        return model.eval()

    return load


START_SECONDS, STOP_SECONDS = 120, 30


class Server:
    """`qserve serve` on a free port, until stopped."""

    def __init__(self, model, log_path, *flags):
        self.log_path = log_path
        command = [sys.executable, "-m", "qserve.cli", "serve", str(model), "--port", "0"]
        with open(log_path, "w") as log:
            self.process = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=subprocess.STDOUT
            )
        self.url = self._wait_for_url()

    def _wait_for_url(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            found = re.search(r"^Serving .* on (http:\S+)$", self.log_path.read_text(), re.M)
            if found:
                return found[1]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"the server did not start:\n{self.log_path.read_text()}")

    def client(self, key="none"):
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def stop(self):
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory):
    """(model folder, *flags) -> a running Server, on the CPU unless a flag says otherwise."""
    servers = []

    def start(model, *flags):
        device = () if "--device" in flags else ("--device", "cpu")
        log_path = tmp_path_factory.mktemp("server") / "log"
        servers.append(Server(model, log_path, *device, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
