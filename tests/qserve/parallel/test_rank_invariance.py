"""--batch-invariant on several ranks: a request's bits are the same in any batch."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from qkernels.collective.reference import all_reduce
from qkernels.operands.split_k import SplitKPartials
from qkernels.rowwise.spec import NormSpec
from qserve.commands.check_invariance import InvarianceConfig, compare
from qserve.config import EngineConfig
from qserve.engine.distributed import executors
from qserve.engine.runner import microbatches
from qserve.parallel import torch_communicator
from qserve.parallel.norm import NormOverRanks
from qserve.parallel.torch_communicator import TorchCommunicator
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.qserve.parallel.engines import SMALL, make_prompts
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.rank_of_small_parts import MIN_TOKENS

FEW = InvarianceConfig(num_requests=8, max_input_len=60, output_len=6)


def differing(folder, tensor=1, stages=1, **settings):
    engine = EngineConfig(
        model=str(folder),
        device="cpu",
        max_model_len=96,
        batch_invariant=True,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **settings,
    )
    results = list(compare(engine, FEW))
    assert len(results) == 8
    return {each.comparison: each.bits_differ for each in results if each.bits_differ}


def test_requests_have_the_same_bits_on_two_ranks(quantized_5m, many):
    """In chunks, with pages of others and pages that run out."""
    llm = many(quantized_5m, 2, batch_invariant=True, **SMALL)
    prompts = make_prompts(8)
    alone = [facts(llm, [prompt])[0] for prompt in prompts]
    assert facts(llm, prompts) == alone
    assert facts(llm, prompts[::-1])[::-1] == alone


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["granite_hybrid", "qwen3_next", "falcon_mamba"])
def test_sharded_states_are_batch_invariant(family, tiny_model, many):
    """Four ranks norm two groups of Mamba-2 together."""
    llm = many(tiny_model(family), 4, batch_invariant=True, **SMALL)
    prompts = make_prompts(8)
    alone = [facts(llm, [prompt])[0] for prompt in prompts]
    assert facts(llm, prompts) == alone


def facts(llm, prompts):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [each.outputs[0] for each in llm.generate(given, params, use_tqdm=False)]
    return [
        (each.token_ids, [{t: one.logprob for t, one in of.items()} for of in each.logprobs])
        for each in outputs
    ]


@pytest.mark.exhaustive
def test_every_comparison_on_two_ranks(quantized_5m):
    assert differing(quantized_5m, 2) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "tensor", "stages"),
    [
        ("olmo2", 2, 1),
        ("qwen2_moe", 2, 1),
        ("gpt_oss", 2, 1),
        ("deepseek_v2", 2, 1),
        ("llama", 1, 2),
        ("qwen3_moe", 2, 2),
    ],
)
def test_families(tiny_model, family, tensor, stages):
    assert differing(tiny_model(family), tensor, stages) == {}


@pytest.mark.exhaustive
def test_pipeline_microbatches_are_batch_invariant(quantized_5m, many, monkeypatch):
    """Steps are cut where their tokens are many, so at other places alone than together."""
    monkeypatch.setattr(microbatches, "MIN_TOKENS", MIN_TOKENS)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_parts")
    llm = many(quantized_5m, 1, 2, batch_invariant=True, **SMALL)
    prompts = make_prompts(8)
    alone = [facts(llm, [prompt])[0] for prompt in prompts]
    assert facts(llm, prompts[::-1])[::-1] == alone


@pytest.mark.exhaustive
def test_adapters(tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    modules = [
        f"{rank}={write_adapter(folder, tmp_path / str(rank), rank=rank, seed=rank)}"
        for rank in (3, 16)
    ]
    settings = {"enable_lora": True, "lora_modules": modules, "max_loras": 2}
    assert differing(folder, 2, **settings) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_8bit_pages(quantized_5m, dtype):
    assert differing(quantized_5m, 2, kv_cache_dtype="fp8", dtype=dtype) == {}


@pytest.fixture
def nccl(monkeypatch):
    """A communicator of three ranks over NCCL, of which this is the first; the others' x is 2 and 3
    times its own."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")

    def gather(out, x, group):
        out.copy_(torch.cat([x, 2 * x, 3 * x]))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(torch_communicator, "PIECE_BYTES", 64)
    return TorchCommunicator("group", fixed_order=True)


@pytest.mark.parametrize("rows", [1, 7, 200])
def test_sums_without_peer_memory_are_in_rank_order(nccl, rows):
    x = torch.randn(rows, 24).bfloat16()
    assert torch.equal(nccl.all_reduce(x), all_reduce([x, 2 * x, 3 * x]))


def test_partial_sums_are_rounded_before_they_are_sent(nccl):
    parts = SplitKPartials(parts=torch.randn(4, 5, 24), dtype=torch.bfloat16)
    x = parts.total()
    assert torch.equal(nccl.all_reduce(parts), all_reduce([x, 2 * x, 3 * x]))
    assert not torch.equal(x.float(), parts.parts.sum(0))


@pytest.mark.parametrize("width", [1, 5, 96, 100])
def test_squared_sum_order_is_fixed(width):
    weight = torch.rand(width)

    def work(communicator):
        norm = NormOverRanks(
            communicator=communicator, total=2 * width, counts=True, fixed_order=True
        )
        spec = NormSpec(kind="rms", weight_C=weight, bias_C=None, eps=1e-6)
        whole = norm(x, spec)
        assert torch.equal(whole, torch.cat([norm(row, spec) for row in x.split(1)]))
        return whole

    x = torch.randn(40, width)
    want = functional.rms_norm(torch.cat([x, x], 1).double(), (2 * width,), None, 1e-6)
    for found in run_ranks(2, work):
        assert torch.allclose(found.double(), want[:, :width] * weight, atol=1e-5)
