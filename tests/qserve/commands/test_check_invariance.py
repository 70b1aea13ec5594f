"""--batch-invariant: a request's tokens and log probabilities are the same bits in any batch."""

import dataclasses
import random

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.commands.check_invariance import (
    InvarianceConfig,
    _random_batches,
    check_invariance,
    compare,
)
from qserve.config import EngineConfig
from qserve.llm import LLM
from tests.adapters import write_adapter
from tests.qserve.speculation.hybrid_mtp_model import FAMILIES as HYBRID_MTP_FAMILIES
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.tiny_vision import VISION_FAMILIES, write_tiny_vision

DENSE = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "smollm3"),
    *("granite", "olmo2", "olmo3", "exaone4", "glm4", "cohere", "cohere2", "opt", "stablelm"),
    *("phi", "gpt_neox", "gptj", "falcon", "starcoder2", "nemotron", "seed_oss"),
    *("bloom", "mpt", "gemma4"),
)
EXPERTS = (
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granite_moe", "solar_open"),
    *("hunyuan_moe", "granite_moe_shared", "ernie4_5_moe", "glm4_moe", "dots1", "minimax_m2"),
    *("afmoe", "llama4", "exaone_moe", "gpt_oss"),
)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT = ("minicpm3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
STATES = (
    *("lfm2", "lfm2_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "granite_hybrid"),
    *(
        "granite_hybrid_moe",
        "olmo_hybrid",
        "nemotron_h",
        "nemotron_h_moe",
        "nemotron_h_latent",
        "bamba",
    ),
    *("falcon_h1", "mamba", "falcon_mamba", "mamba2", "jamba"),
)
QUICK = ("lfm2", "minicpm3", "gemma3", "opt", "qwen2_moe")
FEW = InvarianceConfig(num_requests=8, max_input_len=60, output_len=6)


def settings(folder, **changes):
    return EngineConfig(
        **{
            "model": str(folder),
            "device": "cpu",
            "max_model_len": 96,
            "batch_invariant": True,
            "gpu_memory_utilization": 0.1,
        }
        | changes
    )


def all_same(engine, config=FEW, num_comparisons=8):
    results = list(compare(engine, config))
    assert len(results) == num_comparisons
    cached = next(each for each in results if each.comparison == "from the prefix cache")
    assert cached.cached_tokens > 0
    return {each.comparison: each.bits_differ for each in results if each.bits_differ} == {}


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in (*DENSE, *EXPERTS, *LATENT)
    ],
)
def test_every_family(tiny_model, family):
    assert all_same(settings(tiny_model(family)))


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.exhaustive)
        for family in STATES
    ],
)
def test_models_with_states(tiny_model, family):
    """Prompts long enough for snapshots."""
    config = InvarianceConfig(num_requests=5, max_input_len=150, output_len=6)
    assert all_same(settings(tiny_model(family), max_model_len=176), config)


@pytest.mark.exhaustive
def test_comparisons_match_their_names(quantized_5m):
    config = dataclasses.replace(FEW, num_requests=12, output_len=17, structured_output=True)
    found = {each.comparison: each for each in compare(settings(quantized_5m), config)}
    crossed = found["all of these, without CUDA graphs"]
    preempted = next(found[name] for name in found if name.endswith("with preemption"))
    assert preempted.preemptions > 0 and found["all together"].preemptions == 0
    assert crossed.preemptions > 0 and crossed.accepted_drafts > 0
    assert found["with ngram drafts"].accepted_drafts > 0
    assert {each.requests for each in found.values()} == {1, 12}
    assert {each.bits_differ for each in found.values()} == {0}


def test_only_requested_comparisons_run(tiny_model):
    config = dataclasses.replace(FEW, num_requests=2, comparison=["drafts", "random"])
    found = [each.comparison for each in compare(settings(tiny_model("llama")), config)]
    assert found == ["alone again", "random batches of 1 to 2", "with ngram drafts"]
    with pytest.raises(
        InputError, match="--comparison: expected one of together, .* found 'alone'"
    ):
        InvarianceConfig(comparison=["alone"])


@pytest.mark.parametrize(
    "comparison, found",
    [
        ("drafts", []),
        pytest.param(
            "crossed", ["all of these, without CUDA graphs"], marks=pytest.mark.exhaustive
        ),
    ],
)
def test_ranks_that_divide_prompts_have_no_drafts(tiny_model, capsys, comparison, found):
    config = dataclasses.replace(FEW, num_requests=2, comparison=[comparison])
    ranks = {"prefill_context_parallel_size": 2, "prefill_context_parallel_min_tokens": 8}
    folder = tiny_model("llama")
    assert check_invariance(str(folder), settings(folder, **ranks), config) == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith("Without drafts: ")
    assert [row.split("  ")[0] for row in rows] == ["alone again", *found]


@pytest.mark.parametrize(
    ("name", "value"), [("num_requests", 1), ("long_every", 0), ("chunk_tokens", 3)]
)
def test_numbers_out_of_range_are_refused(name, value):
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(InputError, match=f"{flag}: expected .* or more, found {value}"):
        InvarianceConfig(**{name: value})


def test_random_batches_have_all_sizes():
    batches = _random_batches(random.Random(0), range(400), 64)
    assert sorted(number for each in batches for number in each) == list(range(400))
    sizes = {len(each) for each in batches}
    assert min(sizes) == 1 and 32 < max(sizes) <= 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", HYBRID_MTP_FAMILIES)
def test_mtp_on_models_with_states(tmp_path, family):
    """Drafts of the model's own layer, of which some are accepted: the bits without drafts."""
    folder = make_hybrid_mtp(tmp_path / family, family, agreement=0.7)
    config = InvarianceConfig(
        num_requests=6, max_input_len=100, output_len=24, comparison=["drafts", "crossed"]
    )
    engine = settings(
        folder,
        max_model_len=128,
        speculative_config='{"method": "mtp", "num_speculative_tokens": 3, "adaptive": false}',
    )
    found = {each.comparison: each for each in compare(engine, config)}
    assert [each.bits_differ for each in found.values()] == [0, 0, 0]
    assert found["with mtp drafts"].accepted_drafts > 0


# families whose indexers select keys, which is refused
SELECTING = ("minimax_m3",)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [name for name in VISION_FAMILIES if name not in SELECTING])
def test_images(tmp_path, family):
    longest = 128 if family.startswith(("qwen3_5", "lfm", "nemotron")) else 60  # for snapshots
    config = InvarianceConfig(num_requests=6, max_input_len=longest, output_len=6)
    engine = settings(write_tiny_vision(tmp_path / family, family), max_model_len=256)
    assert all_same(engine, config)


def test_bidirectional_images(tmp_path):
    """Without and with images in a step, text and images keep their bits."""
    config = dataclasses.replace(FEW, num_requests=5, max_input_len=50, comparison=["together"])
    engine = settings(write_tiny_vision(tmp_path / "gemma3", "gemma3"), max_model_len=128)
    results = list(compare(engine, config))
    assert [each.bits_differ for each in results] == [0, 0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "scheme",
    [
        "w4a16-sym",
        *(
            pytest.param(scheme, marks=pytest.mark.exhaustive)
            for scheme in (
                *("w4a16-asym-g32", "w8a16-sym", "w8a8", "w8a8-fp8", "w3a16-sym"),
                *("w4a8", "w4a8-fp8", "w4a16-mxfp4", "w4a16-nvfp4"),
            )
        ),
    ],
)
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)]
)
def test_every_scheme(docs_5m, tmp_path, scheme, dtype):
    folder = tmp_path / "model"
    scheme = Scheme.parse(scheme)
    quantize_checkpoint(docs_5m, folder, scheme=scheme, recipe="rtn", progress=False)
    assert all_same(settings(folder, dtype=dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_8bit_pages(quantized_5m, kv_cache_dtype):
    assert all_same(settings(quantized_5m, kv_cache_dtype=kv_cache_dtype))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_8bit_latents(tiny_model, kv_cache_dtype):
    assert all_same(settings(tiny_model("deepseek_v3"), kv_cache_dtype=kv_cache_dtype))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in ("gemma3", "phi3", "qwen2_moe", "gemma4", "opt", "glm4_moe", "afmoe")
        ),
    ],
)
def test_adapters(tiny_model, tmp_path, family):
    """Requests without an adapter, and with adapters of several ranks, in any order of slots."""
    folder = tiny_model(family)
    assert all_same(settings(folder, **adapters(folder, tmp_path)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "nemotron_h", "olmo_hybrid", "jamba"])
def test_adapters_of_models_with_states(tiny_model, tmp_path, family):
    """Prompts long enough for snapshots."""
    folder = tiny_model(family)
    config = InvarianceConfig(num_requests=4, max_input_len=150, output_len=4)
    assert all_same(settings(folder, max_model_len=176, **adapters(folder, tmp_path)), config)


def test_adapters_of_the_default_kernels_differ(tiny_model, tmp_path):
    config = dataclasses.replace(FEW, default_kernels=True)
    folder = tiny_model("qwen3")
    changes = adapters(folder, tmp_path) | {"batch_invariant": False}
    results = list(compare(settings(folder, **changes), config))
    assert next(each for each in results if each.comparison == "all together").bits_differ > 0


def adapters(folder, tmp_path):
    """Settings with two adapters: all linears, and those of attention alone."""
    parts = {"wide": {"rank": 20, "seed": 1}, "thin": {"rank": 3, "seed": 2, "only": ATTENTION}}
    modules = [
        f"{name}={write_adapter(folder, tmp_path / name, **settings)}"
        for name, settings in parts.items()
    ]
    return {"enable_lora": True, "lora_modules": modules, "max_lora_rank": 32, "max_loras": 2}


def test_default_kernels_differ(quantized_5m, capsys):
    config = InvarianceConfig(num_requests=8, max_input_len=60, output_len=6, default_kernels=True)
    assert check_invariance(str(quantized_5m), settings(quantized_5m), config) == 1
    table = capsys.readouterr().out.splitlines()
    together = next(line for line in table if line.startswith("all together"))
    assert int(together.split()[4]) > 0


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"kv_cache_dtype": "int4"}, "--kv-cache-dtype int4"),
        (
            {"speculative_config": '{"method": "ngram"}', "spec_acceptance": "rejection"},
            "--spec-acceptance",
        ),
        ({"kernel": ["w4a16=triton"]}, "--kernel"),
    ],
)
def test_conflicting_kernel_settings_are_refused(quantized_5m, changes, flag):
    with pytest.raises(InputError, match=f"{flag}.*--batch-invariant"):
        LLM(str(quantized_5m), device="cpu", batch_invariant=True, **changes)


def test_gemma_3n_is_refused(tiny_model):
    with pytest.raises(InputError, match="--batch-invariant: .* Gemma3nForCausalLM: .* streams"):
        LLM(str(tiny_model("gemma3n")), device="cpu", batch_invariant=True)
