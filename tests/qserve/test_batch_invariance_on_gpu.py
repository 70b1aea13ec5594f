"""--batch-invariant on a GPU: a request's bits are the same in any company."""

import pytest

from calibrate.pipeline import quantize_checkpoint
from formats.scheme import Scheme
from qserve import LLM, SamplingParams
from qserve.commands.check_invariance import InvarianceConfig, compare
from qserve.config import EngineConfig

pytestmark = pytest.mark.hopper

CONFIG = InvarianceConfig(num_requests=64, max_input_len=700, output_len=12)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w8a8", None])
def test_requests_have_the_same_bits_in_any_company(docs_5m, tmp_path, scheme, kv_cache_dtype):
    folder = docs_5m
    if scheme is not None:
        folder = tmp_path / "model"
        scheme = Scheme.parse(scheme)
        quantize_checkpoint(docs_5m, folder, scheme=scheme, recipe="rtn", progress=False)
    engine = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        max_model_len=1024,
        batch_invariant=True,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=0.1,
        max_num_seqs=64,
    )
    assert [each for each in compare(engine, CONFIG) if each.bits_differ] == []


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
