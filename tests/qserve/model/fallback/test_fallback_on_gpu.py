"""Models through transformers on a CUDA GPU: steps in CUDA graphs, and models that have none."""

import logging

import pytest

from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_on_gpu import alike
from tests.qserve.model.test_hybrid_tokens import prompts

pytestmark = pytest.mark.gpu

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 10000.0},
    **{"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [1.5] * 8},
}


def run(folder, **settings):
    """Return (the engine, its tokens)."""
    usual = {"max_model_len": 64, "num_gpu_blocks_override": 512, "model_impl": "transformers"}
    llm = LLM(folder, device="cuda", **usual | settings)
    return llm, [output.outputs[0].token_ids for output in llm.generate(prompts(), PARAMS)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen3_moe", "gpt_oss"])
def test_graphs_and_eager_steps_agree(tiny_model, family, caplog):
    """In bfloat16: grouped products of torch wait for the device in float32."""
    llm, found = run(tiny_model(family), dtype="bfloat16")
    graphs = llm.engine.runner.graphs
    assert graphs is not None, caplog.text
    assert graphs.num_captured and graphs.decode_keys
    llm.close()
    eager, want = run(tiny_model(family), dtype="bfloat16", enforce_eager=True)
    assert eager.engine.runner.graphs is None
    assert alike(found, want)


def test_model_that_reads_the_device_has_no_graphs(tmp_path, caplog):
    """LongRoPE of transformers looks at the largest position to choose its factors."""
    folder = make_tiny(
        tmp_path / "phi",
        "Phi3Config",
        {
            **{"rope_parameters": LONGROPE, "original_max_position_embeddings": 128},
            "pad_token_id": 0,
        },
    )
    with caplog.at_level(logging.WARNING):
        llm, found = run(folder)
    assert "Phi3ForCausalLM runs without CUDA graphs: its code waits for the device" in caplog.text
    assert llm.engine.runner.graphs is None and len(found[0]) == 10
