"""--batch-invariant on a GPU: a request's bits are the same in any batch."""

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve import LLM, SamplingParams
from qserve.commands.check_invariance import InvarianceConfig, compare
from qserve.config import EngineConfig
from tests.adapters import write_adapter
from tests.conftest import make_tiny
from tests.tiny_families import TINY_FAMILIES
from tests.tiny_vision import write_tiny_vision

pytestmark = pytest.mark.hopper

CONFIG = InvarianceConfig(num_requests=64, max_input_len=700, output_len=12)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", None])
def test_requests_have_the_same_bits_in_any_batch(docs_5m, tmp_path, scheme, kv_cache_dtype):
    assert differing(quantized(docs_5m, tmp_path, scheme), kv_cache_dtype) == []


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", None])
def test_experts_have_the_same_bits_in_any_batch(tmp_path, scheme):
    config_class, extra = TINY_FAMILIES["qwen2_moe"]
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    folder = make_tiny(tmp_path / "float", config_class, {**extra, **sizes})
    assert differing(quantized(folder, tmp_path, scheme)) == []


@pytest.mark.parametrize(
    "family", ["qwen3_5", "qwen3_next", "granite_hybrid", "falcon_h1", "lfm2", "minicpm3"]
)
def test_states_and_latents_have_the_same_bits_in_any_batch(tmp_path, family):
    config_class, extra = TINY_FAMILIES[family]
    longer = {"max_position_embeddings": 1024}
    assert differing(make_tiny(tmp_path / family, config_class, {**extra, **longer})) == []


def test_8bit_latents_have_the_same_bits_in_any_batch(tmp_path):
    config_class, extra = TINY_FAMILIES["minicpm3"]
    longer = {"max_position_embeddings": 1024}
    folder = make_tiny(tmp_path / "minicpm3", config_class, {**extra, **longer})
    assert differing(folder, kv_cache_dtype="fp8") == []


@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", None])
def test_adapters_have_the_same_bits_in_any_batch(docs_5m, tmp_path, scheme):
    ranks = {"wide": 20, "thin": 3, "whole": 16}
    modules = [
        f"{name}={write_adapter(docs_5m, tmp_path / name, rank=rank, seed=rank)}"
        for name, rank in ranks.items()
    ]
    settings = {"enable_lora": True, "lora_modules": modules, "max_lora_rank": 32, "max_loras": 3}
    assert differing(quantized(docs_5m, tmp_path, scheme), **settings) == []


@pytest.mark.parametrize("family", ["smolvlm", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_images_have_the_same_bits_in_any_batch(tmp_path, family):
    folder = write_tiny_vision(tmp_path / family, family)
    config = InvarianceConfig(num_requests=24, max_input_len=100, output_len=8)
    assert differing(folder, config=config, max_model_len=256) == []


def quantized(folder, tmp_path, scheme):
    if scheme is None:
        return folder
    to = tmp_path / "model"
    quantize_checkpoint(folder, to, scheme=Scheme.parse(scheme), recipe="rtn", progress=False)
    return to


def differing(folder, kv_cache_dtype="auto", config=CONFIG, max_model_len=1024, **settings):
    engine = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=max_model_len,
        batch_invariant=True,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=1.0,  # whatever else is on the GPU
        max_num_seqs=64,
        **settings,
    )
    return [each for each in compare(engine, config) if each.bits_differ]


@pytest.mark.parametrize("quantization", ["w4a16", "w8a8", None])
def test_prompt_logprobs_have_the_bits_of_generated_tokens(docs_5m, quantization):
    settings = {"dtype": "bfloat16", "batch_invariant": True, "quantization": quantization}
    llm = LLM(docs_5m, **settings, max_model_len=1024, gpu_memory_utilization=0.1)
    prompts = [[(7 * i + 3 * j) % 500 + 3 for j in range(2 + 9 * i)] for i in range(40)]
    drawn = SamplingParams(max_tokens=64, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    outputs = [each.outputs[0] for each in llm.generate(prompts, drawn, use_tqdm=False)]
    whole = [ids + each.token_ids for ids, each in zip(prompts, outputs, strict=True)]
    read = SamplingParams(max_tokens=0, prompt_logprobs=2, temperature=0)
    for ids, output, again in zip(
        prompts, outputs, llm.generate(whole, read, use_tqdm=False), strict=True
    ):
        found = again.prompt_logprobs[len(ids) :]
        assert [{t: one.logprob for t, one in each.items()} for each in output.logprobs] == [
            {t: one.logprob for t, one in each.items()} for each in found
        ]
