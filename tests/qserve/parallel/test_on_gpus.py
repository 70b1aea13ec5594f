"""Ranks on GPUs of their own: NCCL, CUDA graphs on each, the same tokens as one GPU."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.pipeline import quantize_checkpoint
from formats.errors import InputError
from formats.scheme import Scheme
from qserve.engine.kv_cache import state_snapshots
from qserve.llm import LLM
from qserve.lora.request import LoRARequest
from qserve.params.sampling_params import SamplingParams
from tests.adapters import write_adapter
from tests.conftest import make_tiny
from tests.qserve.model.test_hybrid_on_gpu import WITH_EXPERTS
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp
from tests.qserve.ties import assert_same_up_to_ties
from tests.tiny_families import TINY_FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]
TEXTS = [
    "The borrow checker rejects a program in which",
    "A trait object is",
    "In this chapter we",
    "fn main() {\n    let mut values = vec![1, 2, 3];\n",
    "Closures capture their environment",
]


@pytest.fixture
def many():
    started = []

    def make(folder, tensor=1, stages=1, **settings):
        settings = {"dtype": "float16", "max_model_len": 1024, "max_num_seqs": 8} | settings
        started.append(
            LLM(
                folder,
                device="cuda",
                num_gpu_blocks_override=512,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                **settings,
            )
        )
        return started[-1]

    yield make
    for llm in started:
        llm.close()


def answers(llm, lora=None):
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    outputs = llm.generate(TEXTS, params, use_tqdm=False, lora_request=lora)
    return [each.outputs[0] for each in outputs]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_two_gpus_equal_one(quantized_5m, many, settings):
    alone, two = many(quantized_5m, **settings), many(quantized_5m, 2, **settings)
    want, found = answers(alone), answers(two)
    assert_same_up_to_ties(want, found)
    assert [each.token_ids for each in answers(two)] == [each.token_ids for each in found]
    ids = list(range(3, 303))
    want, found = alone.logits(ids).float(), two.logits(ids).float()
    assert (found - want).norm() / want.norm() < 0.02


def test_loading_error_ends_all_ranks(tiny_model, many):
    """No kernel takes experts of 16. The leader closes while it learns that rank 1 has ended."""
    for _ in range(3):
        with pytest.raises(InputError, match="no kernel supports them"):
            many(tiny_model("qwen3_next"), 2, max_model_len=256)


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_stages_run_in_graphs(drafts, quantized_5m, many):
    settings = {}
    if drafts:
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    alone, two = many(quantized_5m, **settings), many(quantized_5m, 1, 2, **settings)
    graphs = two.engine.workers.runner.graphs
    replayed, replay = [], graphs.replay
    graphs.replay = lambda key: replayed.append(key) or replay(key)
    want, found = answers(alone), answers(two)
    assert any(key.is_chunk for key in replayed) and not all(key.is_chunk for key in replayed)
    assert_same_up_to_ties(want, found)
    while two.engine.use_idle_time():
        pass  # the other graphs
    assert graphs.num_captured == graphs.num_keys
    assert [each.token_ids for each in answers(two)] == [each.token_ids for each in found]
    ids = list(range(3, 703))  # in microbatches
    want, found = alone.logits(ids).float(), two.logits(ids).float()
    assert (found - want).norm() / want.norm() < 0.02


def test_sleep_and_new_weights(quantized_5m, many, tmp_path):
    """Graphs are captured again: all ranks sum at the same time."""
    llm = many(quantized_5m, 2)
    before = [each.token_ids for each in answers(llm)]
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping
        llm.wake_up()
        assert [each.token_ids for each in answers(llm)] == before
    other = shutil.copytree(quantized_5m, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, other / "model.safetensors")
    llm.update_weights(str(other))
    found = [each.token_ids for each in answers(llm)]
    llm.close()
    assert found == [each.token_ids for each in answers(many(other, 2))] != before


@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_moe", "granite_hybrid", "falcon_h1", "lfm2", "nemotron_h_moe"]
)
def test_states(family, tiny_model, many, monkeypatch, tmp_path):
    """Granite's norm of one group is over both GPUs, within the graphs."""
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 16)
    settings = {"dtype": "bfloat16", "max_model_len": 256}
    folder = tiny_model(family)
    if family in WITH_EXPERTS:
        settings["dtype"] = "float16"  # in bfloat16, ties of the router fall differently
        config_class, extra = TINY_FAMILIES[family]
        extra = extra | {"moe_intermediate_size": 128}  # kernels take 64 on each rank
        folder = make_tiny(tmp_path / family, config_class, extra)
    alone, two = (many(folder, ranks, **settings) for ranks in (1, 2))
    ids = [(7 * j) % 500 + 3 for j in range(200)]
    want, found = alone.logits(ids).float(), two.logits(ids).float()
    # a tiny random model turns a last bit of 8 into some percent
    assert (found - want).norm() / want.norm() < 0.1
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    prompts = [ids[:90], ids[:90] + [5] * 20, ids[:130], ids[:90] + [6] * 40]
    runs = []
    for _ in range(2):
        two.reset_prefix_cache()
        outputs = two.generate(prompts, params, use_tqdm=False)
        runs.append([each.outputs[0].token_ids for each in outputs])
    assert runs[0] == runs[1]
    assert two.generate([ids[:130]], params, use_tqdm=False)[0].num_cached_tokens == 128


def test_mtp_layer_drafts(many, tmp_path):
    folder = make_hybrid_mtp(tmp_path / "mtp", "qwen3_5", 0.99)
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    settings = {"dtype": "bfloat16", "max_model_len": 256}
    two = many(folder, 2, speculative_config=json.dumps(config), **settings)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    two.generate([[5 + n] * 20 for n in range(6)], params, use_tqdm=False)
    verifies, _, *accepted = two.engine.scheduler.speculation.take_counts()
    assert verifies < 3 * accepted[0] <= 3 * verifies


def test_sampled_tokens_are_reproducible(quantized_5m, many):
    """They are drawn on both GPUs, and each feeds its own next step: a difference would show."""
    two = many(quantized_5m, 2)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True)
    runs = [
        [each.outputs[0].token_ids for each in two.generate(TEXTS, params, use_tqdm=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_two_stages(quantized_5m, many):
    assert_same_up_to_ties(answers(many(quantized_5m)), answers(many(quantized_5m, 1, 2)))


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_adapters(tensor, stages, quantized_5m, tmp_path, many):
    folder = write_adapter(quantized_5m, tmp_path / "adapter", size=1.0)
    lora, settings = LoRARequest("a", 1, str(folder)), {"enable_lora": True}
    alone, two = many(quantized_5m, **settings), many(quantized_5m, tensor, stages, **settings)
    for each in (lora, None):
        assert_same_up_to_ties(answers(alone, each), answers(two, each))


def test_drafter_on_the_first_stage(quantized_5m, many):
    """With a step in flight, of whose drafts the other stage learns on its device alone."""
    config = {"method": "draft_model", "model": str(quantized_5m), "num_speculative_tokens": 3}
    two = many(quantized_5m, 1, 2, speculative_config=json.dumps(config))
    assert_same_up_to_ties(answers(many(quantized_5m)), answers(two))
    verifies, drafts, *accepted = two.engine.scheduler.speculation.take_counts()
    assert drafts >= verifies > 0 and accepted[0] > 0


def test_weights_per_gpu_are_halved(quantized_5m, many):
    """But for norms and the like."""
    one, two = (many(quantized_5m, ranks).engine.workers._ours.facts()[1] for ranks in (1, 2))
    assert two < 0.6 * one


def test_unequal_shards(many, tmp_path):
    """down_proj has 256 inputs on one GPU and 128 on the other, whose kernel does not split K."""
    extra = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    extra |= {"num_key_value_heads": 2, "head_dim": 64}
    whole, folder = make_tiny(tmp_path / "float", "LlamaConfig", extra), tmp_path / "quantized"
    quantize_checkpoint(
        whole, folder, scheme=Scheme.parse("w4a16-sym"), recipe="rtn", progress=False
    )
    settings = {"max_model_len": 128}
    alone, two = many(folder, **settings), many(folder, 2, **settings)
    ids = list(range(3, 103))
    want, found = alone.logits(ids).float(), two.logits(ids).float()
    assert (found - want).norm() / want.norm() < 0.05
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids[n : n + 20]} for n in range(8)]
    runs = [
        [each.outputs[0].token_ids for each in two.generate(given, params, use_tqdm=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


WHOLE_EXPERTS = {"enable_expert_parallel": True}


@pytest.mark.parametrize("scheme", ["w4a16-sym-g32", "w3a16-sym-g32"])
def test_expert_parallel_in_graphs(scheme, written, many):
    """In CUDA graphs, whatever the tokens choose; the 3-bit experts cannot be cut."""
    folder = written(scheme, "gptq", "qwen3_moe")
    settings = {"max_model_len": 128}
    alone, two = many(folder, **settings), many(folder, 2, **settings, **WHOLE_EXPERTS)
    ids = list(range(3, 103))
    want, found = alone.logits(ids).float(), two.logits(ids).float()
    assert (found - want).norm() / want.norm() < 0.05
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": ids[n : n + 20]} for n in range(0, 40, 8)]
    runs = [
        [each.outputs[0].token_ids for each in two.generate(given, params, use_tqdm=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("kv_cache", ["auto", "fp8"])
def test_context_parallel_prompts(kv_cache, quantized_5m, many):
    """Prompts of 700 tokens in steps of 512; decode steps, the same on both GPUs, in graphs."""
    settings = {"kv_cache_dtype": kv_cache, "max_num_batched_tokens": 512}
    two = many(
        quantized_5m,
        prefill_context_parallel_size=2,
        prefill_context_parallel_min_tokens=64,
        **settings,
    )
    alone = many(quantized_5m, **settings)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    given = [{"prompt_token_ids": [3 + n, *range(10, 709)]} for n in range(4)]
    want, found = (
        [each.outputs[0] for each in llm.generate(given, params, use_tqdm=False)]
        for llm in (alone, two)
    )
    assert_same_up_to_ties(want, found)
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True)
    runs = [
        [each.outputs[0].token_ids for each in two.generate(given, drawn, use_tqdm=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA GPUs")
DIVIDED = {"prefill_context_parallel_size": 4, "prefill_context_parallel_min_tokens": 64}


@needs_four
@pytest.mark.parametrize(
    ("tensor", "stages", "settings"),
    [(4, 1, {}), (4, 1, {"all_reduce": "nccl"}), (2, 2, {}), (1, 4, {}), (1, 1, DIVIDED)],
    ids=["tensor", "nccl", "tensor and stages", "stages", "context"],
)
def test_four_gpus_equal_one(tensor, stages, settings, quantized_5m, many):
    """Two of docs-5m's four ranks share each of its two KV heads."""
    alone, four = many(quantized_5m), many(quantized_5m, tensor, stages, **settings)
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=2)
    given = [{"prompt_token_ids": [3 + n, *range(10, 709)]} for n in range(4)]
    want, found = (
        [each.outputs[0] for each in llm.generate(given, params, use_tqdm=False)]
        for llm in (alone, four)
    )
    assert_same_up_to_ties(want, found)
    assert_same_up_to_ties(answers(alone), answers(four))
    drawn = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True)
    runs = [
        [each.outputs[0].token_ids for each in four.generate(TEXTS, drawn, use_tqdm=False)]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]


@needs_four
def test_expert_parallel_on_four_gpus(written, many):
    folder = written("w4a16-sym-g32", "gptq", "qwen3_moe")
    settings = {"max_model_len": 128}
    alone, four = many(folder, **settings), many(folder, 4, **settings, **WHOLE_EXPERTS)
    ids = list(range(3, 103))
    want, found = alone.logits(ids).float(), four.logits(ids).float()
    assert (found - want).norm() / want.norm() < 0.05


EXIT_PROGRAM = """
import os, signal, sys, threading
from qserve import LLM, SamplingParams

def main():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, ending, tensor, stages, contexts = *sys.argv[1:3], *map(int, sys.argv[3:])
    llm = LLM(folder, device="cuda", dtype="float16", max_model_len=1024, max_num_seqs=4,
              num_gpu_blocks_override=256, tensor_parallel_size=tensor,
              pipeline_parallel_size=stages, all_reduce="nccl",
              prefill_context_parallel_size=contexts, prefill_context_parallel_min_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm.generate([list(range(3, 803))], params, use_tqdm=False)
    llm.logits(list(range(3, 303)))
    while llm.engine.use_idle_time():
        pass  # capture every graph, with the sums of NCCL in it
    llm.generate([list(range(3, 803))], params, use_tqdm=False)
    print("LEAVING", flush=True)
    if ending == "closed":
        llm.close()
    if ending == "error":
        raise ValueError("planted")
    if ending == "interrupted":
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        endless = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        while True:
            llm.generate([[3, 4, 5]] * 4, endless, use_tqdm=False)

main()
print("LEFT", flush=True)
"""
EXIT_SECONDS = 60  # a hang never ends


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param((2, 1, 1), id="tensor"),
        pytest.param((1, 2, 1), id="pipeline"),
        pytest.param((1, 1, 2), id="context"),
        pytest.param((2, 2, 1), id="tensor and pipeline", marks=needs_four),
    ],
)
@pytest.mark.parametrize("ending", ["closed", "collected", "error", "interrupted"])
def test_program_exits_after_nccl_sums(ending, sizes, quantized_5m, tmp_path):
    command = [sys.executable, "-c", EXIT_PROGRAM]
    command += [str(quantized_5m), ending, *map(str, sizes)]
    with open(tmp_path / "err", "w+") as errors:
        program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert program.stdout.readline() == "LEAVING\n", (tmp_path / "err").read_text()
            program.wait(timeout=EXIT_SECONDS)
            rest = program.stdout.read()  # communicate() would lose what readline() has buffered
        finally:
            program.kill()
    is_clean = ending in ("closed", "collected")
    assert (rest == "LEFT\n") == is_clean
    assert (program.returncode == 0) == is_clean
