"""Adapters on a CUDA GPU: kernels against merged weights, CUDA graphs, slots filled anew."""

import dataclasses

import pytest
import torch

from formats.scheme import Scheme
from qserve.llm import LLM
from qserve.lora.merge import merge_adapter
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_on_gpu import WITH_EXPERTS
from tests.tiny_families import TINY_FAMILIES

pytestmark = pytest.mark.gpu

PROMPTS = [[3 + n, *range(20, 20 + 3 * n)] for n in range(12)]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)


def make(folder, *, device="cuda", **settings):
    settings = {"enable_lora": True, "max_loras": 2, "num_gpu_blocks_override": 512, **settings}
    return LLM(str(folder), device=device, max_num_seqs=16, **settings)


@pytest.fixture(scope="module")
def loras(docs_5m, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [
        LoRARequest(f"a{n}", n + 1, str(write_adapter(docs_5m, folder / f"{n}", rank=3 + 9 * n)))
        for n in range(2)
    ] + [LoRARequest("b", 3, str(write_adapter(docs_5m, folder / "b", rank=16, seed=7, size=1.0)))]


def tokens(llm, asked, params=PARAMS):
    outputs = llm.generate(PROMPTS, params, False, lora_request=asked)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["float", "w4a16-sym", "w8a8"])
def test_graphs_and_eager_steps_agree(docs_5m, tmp_path, loras, kind):
    """Steps with adapters run in graphs of their own, those without in the plain ones."""
    folder = docs_5m
    if kind != "float":
        from calibrate.pipeline import quantize_checkpoint

        folder = tmp_path / "quantized"
        quantize_checkpoint(docs_5m, folder, scheme=Scheme.parse(kind), progress=False)
    asked = [[*loras, None][n % 4] for n in range(len(PROMPTS))]
    eager = make(folder, enforce_eager=True)
    graphs = make(folder)
    assert any(key.has_adapters for key in graphs.engine.runner.graphs._keys)
    want, found = tokens(eager, asked), tokens(graphs, asked)
    # Shapes of steps differ, so sums round differently: texts part late, if at all.
    same = [a[:8] == b[:8] for a, b in zip(want, found, strict=True)]
    assert sum(same) >= len(same) - 1
    plain = make(folder, enable_lora=False)
    assert tokens(graphs, None) == tokens(plain, None)


def test_adapter_logprobs_equal_merged_weights(docs_5m, tmp_path, loras):
    """Log probabilities of prompts in bfloat16, compared with those of the merged model."""
    params = dataclasses.replace(PARAMS, max_tokens=1, prompt_logprobs=0)
    llm = make(docs_5m, max_loras=3)
    for number, lora in enumerate(loras):
        folder = tmp_path / f"{number}"
        merge_adapter(docs_5m, lora.lora_path, folder)
        merged = make(folder, enable_lora=False)
        far = []
        for asked, one in ((lora, llm), (None, merged), (None, llm)):
            outputs = one.generate(PROMPTS, params, False, lora_request=asked)
            found = [
                each.logprob
                for output in outputs
                for entry in output.prompt_logprobs[1:]
                for each in entry.values()
            ]
            far.append(torch.tensor(found))
        beside, inside, without = far
        assert (beside - inside).abs().mean() < 0.2 * (without - inside).abs().mean()


def test_slots_are_refilled_between_steps(docs_5m, loras):
    """One slot for three adapters, with a step in flight: each request has its own throughout."""
    want = {lora: tokens(make(docs_5m, max_loras=3), lora) for lora in loras}
    llm = make(docs_5m, max_loras=1, max_cpu_loras=3)
    for _ in range(2):
        for lora in loras:
            found = tokens(llm, lora)
            same = [a[:8] == b[:8] for a, b in zip(want[lora], found, strict=True)]
            assert sum(same) >= len(same) - 1


@pytest.mark.parametrize("family", ["youtu", "qwen3_5", "nemotron_h", "qwen3_next"])
def test_adapters_of_latents_and_states(family, tiny_model, tmp_path):
    """Graphs against eager steps, and logits against the CPU's. Youtu's include kv_b_proj."""
    folder, few = tiny_model(family), dataclasses.replace(PARAMS, max_tokens=6)
    if family in WITH_EXPERTS:
        config_class, extra = TINY_FAMILIES[family]  # kernels take experts of 64 and more
        folder = make_tiny(tmp_path / family, config_class, extra | {"moe_intermediate_size": 64})
    requests = [
        LoRARequest(f"a{n}", n + 1, str(write_adapter(folder, tmp_path / f"{n}", rank=2 + n)))
        for n in range(2)
    ]
    asked = [[*requests, None][n % 3] for n in range(len(PROMPTS))]
    want = tokens(make(folder, enforce_eager=True, dtype="bfloat16"), asked, few)
    found = tokens(make(folder, dtype="bfloat16"), asked, few)
    assert sum(a == b for a, b in zip(want, found, strict=True)) >= len(want) - 3
    params = dataclasses.replace(PARAMS, max_tokens=1, prompt_logprobs=0)
    far = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            str(folder),
            device=device,
            enable_lora=True,
            max_loras=2,
            num_gpu_blocks_override=512,
            dtype="float32" if device == "cpu" else "bfloat16",
        )
        outputs = llm.generate(PROMPTS[4:6], params, False, lora_request=requests)
        rows = (each for output in outputs for each in output.prompt_logprobs[1:])
        far.append(torch.tensor([each.logprob for row in rows for each in row.values()]))
    assert (far[0] - far[1]).abs().mean() < 0.2 * far[0].std()
