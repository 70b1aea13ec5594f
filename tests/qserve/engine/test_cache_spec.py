"""A mixer with a cache of its own shape runs through the whole engine: tokens are transformers'."""

import random

import pytest
import torch

from qserve.engine.kv_cache import state_snapshots
from qserve.model.families import llama
from qserve.params.sampling_params import SamplingParams
from tests.conftest import make_tiny
from tests.qserve.engine import odd_mixer
from tests.qserve.engine.odd_mixer import HEAD_DIM, SHIFT, LatentMixer, ShiftedMixer
from tests.qserve.parallel.engines import start
from tests.qserve.parallel.test_rank_pages import make as make_sharing

PAGE, NUM_TOKENS = 4, 6
PAGE_BYTES = 3 * (576 * PAGE * 4 + 2 * PAGE + 1)  # 3 layers
SMALL = {"block_size": PAGE, "num_gpu_blocks_override": 12, "admission": "fits", "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
    }
    return make_tiny(tmp_path_factory.mktemp("odd") / "model", "LlamaConfig", shape)


@pytest.fixture(scope="module")
def prompts():
    """Some begin alike, so that they find each other's pages."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 500) for _ in range(13)]
    own = [[rng.randrange(3, 500) for _ in range(n)] for n in (1, 4, 9, 17, 2, 5)]
    return [prompt if i < 3 else shared + prompt for i, prompt in enumerate(own)]


def expected(folder, prompts, shift=0.0):
    """Greedy tokens of transformers' model, computed whole for each of them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def add_token_before(module, arguments, fields):
        x = fields["hidden_states"]
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return arguments, fields | {"hidden_states": x + shift * before}

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(add_token_before, with_kwargs=True)
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(NUM_TOKENS):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


@pytest.fixture(scope="module")
def want(folder, prompts):
    return expected(folder, prompts)


@pytest.fixture
def latent(monkeypatch):
    monkeypatch.setattr(llama, "build_attention", LatentMixer)
    module = odd_mixer.__name__
    monkeypatch.setattr("qserve.engine.distributed.executors.MODULE", module)


def generate(llm, prompts):
    """Greedy tokens, how many tokens of prompts were found, and the number of preemptions."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    tokens, num_cached, num_preempted = [[] for _ in prompts], 0, 0
    engine = llm.engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_work():
        for event in engine.step():
            assert event.finish_reason != "error", event.error
            tokens[int(event.request_id)] += event.token_ids
            if event.finish_reason is not None:
                num_cached += event.facts.num_cached
                num_preempted += event.facts.num_preemptions
    writes = () if engine._remote_kv is None else list(engine._remote_kv._writes)
    for future in writes:
        future.result(60)
    engine.scheduler.check_integrity()
    return tokens, num_cached, num_preempted


def test_few_pages_and_the_host_tier(latent, folder, prompts, want, monkeypatch):
    """Chunks, preemption, the prefix cache, and pages that come back from the host."""
    llm = start(folder, max_num_batched_tokens=7, kv_offload_gb=0.01, **SMALL)
    runner = llm.engine.runner
    assert runner.bytes_per_page == PAGE_BYTES == runner.layer_caches.page_copies.page_bytes
    loaded, load = [], runner.layer_caches.page_copies.load

    def counted(moves):
        loaded.extend(moves.loaded_pages)
        load(moves)

    monkeypatch.setattr(runner.layer_caches.page_copies, "load", counted)
    tokens, _, num_preempted = generate(llm, prompts)
    assert tokens == want and num_preempted
    tokens, num_cached, _ = generate(llm, prompts)
    assert tokens == want and num_cached > 20 and loaded


@pytest.mark.exhaustive
def test_page_from_folder_connector(latent, folder, prompts, want, tmp_path):
    first = make_sharing(folder, tmp_path, start, 1, 1, "kv_producer")
    assert generate(first, prompts)[0] == want
    second = make_sharing(folder, tmp_path, start, 1, 1, "kv_consumer")
    tokens, num_cached, _ = generate(second, prompts)
    assert tokens == want and num_cached > 40


@pytest.mark.exhaustive
def test_two_ranks_share_pages_by_a_folder(latent, folder, prompts, want, tmp_path):
    """Each rank keeps the latent values whole and computes with half of the heads."""

    for role in ("kv_producer", "kv_consumer"):
        llm = make_sharing(folder, tmp_path, start, 2, 1, role, kv_offload_gb=0.01)
        try:
            assert llm.engine.workers.bytes_per_page == 2 * PAGE_BYTES
            tokens, num_cached, _ = generate(llm, prompts)
        finally:
            llm.close()
        assert tokens == want
    assert num_cached > 40


def test_state_and_pages(folder, prompts, want, monkeypatch):
    """Snapshots are saved and restored, and preempted requests begin anew."""
    monkeypatch.setattr(llama, "build_attention", ShiftedMixer)
    monkeypatch.setattr(state_snapshots, "SPACING", 4)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 2)
    without, want = want, expected(folder, prompts, SHIFT)
    assert want != without
    llm = start(
        folder,
        max_num_batched_tokens=7,
        **SMALL | {"num_gpu_blocks_override": 10, "admission": "fits"},
    )
    runner = llm.engine.runner
    num_slots = runner.num_state_slots + runner.num_snapshots
    assert runner.bytes_of_states == 3 * num_slots * llm.engine.model_config.hidden_size * 4
    for cache in runner.caches:
        cache.last_SC.fill_(torch.nan)  # what no request has written
    tokens, _, num_preempted = generate(llm, prompts)
    assert tokens == want and num_preempted
    tokens, num_cached, _ = generate(llm, prompts)
    assert tokens == want and num_cached
