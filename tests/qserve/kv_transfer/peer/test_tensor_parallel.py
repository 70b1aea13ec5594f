"""Peers of different --tensor-parallel-size."""

import json

import pytest
import torch

from qserve.engine.kv_cache import state_snapshots
from qserve.llm import LLM
from qserve.params.sampling_params import SamplingParams
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0, detokenize=False)
PROMPTS = [list(range(start, start + 41)) for start in (5, 105)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_one_and_two_rank_engines_exchange_pages(device, docs_5m, tmp_path):
    """KV heads are divided on one side, in both directions."""
    exchange_between_one_rank_and_two("peer", device, docs_5m, tmp_path)


@pytest.mark.exhaustive
def test_layers_with_different_heads(tiny_model, tmp_path):
    """Two ranks divide two KV heads of some layers, and both hold the one of the others."""
    exchange_between_one_rank_and_two("peer", "cpu", tiny_model("mimo_v2"), tmp_path)


def test_keys_of_indexers_are_not_divided(tiny_model, tmp_path):
    """Prompts are longer than what a query sees, so that these keys matter."""
    exchange_between_one_rank_and_two("peer", "cpu", tiny_model("minimax_m3"), tmp_path)


DRAFTED = ["nemotron_h", "kimi_linear", "minimax", "jamba"]
FAMILIES = ["qwen3_next", "granite_hybrid", "lfm2", "falcon_h1", "nemotron_h", "kimi_linear"]
FAMILIES += ["ling_3", "minimax", "olmo_hybrid", "jamba"]


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in FAMILIES)]
)
def test_states_are_divided(family, tiny_model, tmp_path, monkeypatch):
    """Heads of states, and channels of queries, keys and values of convolutions."""
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    exchange_between_one_rank_and_two("peer", "cpu", tiny_model(family), tmp_path)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h"])
def test_states_pass_between_gpus(family, device, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    exchange_between_one_rank_and_two("peer", device, tiny_model(family), tmp_path)


@pytest.mark.parametrize(
    "family",
    ["qwen3_next", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in DRAFTED)],
)
def test_kept_inputs_of_rows_are_divided(family, tiny_model, tmp_path, monkeypatch):
    """Chunks are so short that the states lack their rows, whose inputs are sent."""
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    drafts = {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False}
    settings = {"speculative_config": json.dumps(drafts), "max_num_batched_tokens": 6}
    settings |= {"max_num_seqs": 2}
    exchange_between_one_rank_and_two("peer", "cpu", tiny_model(family), tmp_path, **settings)


def test_heads_of_mtp_layer_are_divided(tmp_path, monkeypatch):
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)
    folder = make_hybrid_mtp(tmp_path / "mtp", "qwen3_next", 0.5)
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    settings = {"speculative_config": json.dumps(drafts)}
    exchange_between_one_rank_and_two("peer", "cpu", folder, tmp_path / "peers", **settings)


def exchange_between_one_rank_and_two(connector, device, folder, tmp_path, **others):
    """Each of two engines decodes a prompt that the other one has computed."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_extra_config": {"path": str(tmp_path)},
    }
    settings = {"device": device, "num_gpu_blocks_override": 64, "max_model_len": 256}
    settings |= {"max_num_batched_tokens": 64, "max_num_seqs": 4, "kv_transfer_config": transfer}
    settings |= {"dtype": "float32" if device == "cpu" else "float16"}
    settings |= others
    llms = [LLM(folder, tensor_parallel_size=size, **settings) for size in (1, 2)]
    try:
        for prompt, (first, second) in zip(PROMPTS, (llms, llms[::-1]), strict=True):
            given = [{"prompt_token_ids": prompt}]
            (wanted,) = first.generate(given, GREEDY, use_tqdm=False)
            (found,) = second.generate(given, GREEDY, use_tqdm=False)
            assert found.num_cached_tokens == 32
            if device == "cpu":  # on GPUs ranks add in another order, and ties may part
                assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
            else:
                assert found.outputs[0].token_ids[:2] == wanted.outputs[0].token_ids[:2]
    finally:
        for llm in llms:
            llm.close()
    assert not list(tmp_path.iterdir())
