"""Ranks that divide the tokens of long prompts: the tokens of one rank, and less work for each."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import Chunk, StepPlan
from qserve.engine.step.context_parallel import divide
from qserve.engine.step.request_rows import RequestRows
from qserve.engine.step.step_input import StepInput
from qserve.parallel.kv_exchange import KvExchange
from qserve.params.sampling_params import SamplingParams
from tests.qserve.parallel.engines import SMALL, make_prompts, start, tokens
from tests.qserve.parallel.in_threads import run_ranks
from tests.qserve.parallel.sharded import rank_runner
from tests.qserve.parallel.test_expert_parallel import WHOLE
from tests.qserve.parallel.test_rank_adapters import LORA, adapted, make_adapters
from tests.qserve.parallel.test_rank_weights import PROMPTS, SETTINGS, digests_of, reference
from tests.tiny_families import STATES, TINY_FAMILIES

QUICK = ("gpt_oss", "deepseek_v3", "gemma4_shared")
TWO = {"prefill_context_parallel_size": 2, "prefill_context_parallel_min_tokens": 8}
FOUR = TWO | {"prefill_context_parallel_size": 4}
PAGE = 8


def step_of(*chunks):
    """A step of (start, count) of requests, each with pages of its own; all sample."""
    planned, first_page = [], 0
    for number, (begin, count) in enumerate(chunks):
        length = begin + count
        pages = -(-length // PAGE)
        request = Request(
            request_id=str(number),
            token_ids=list(range(100 * number, 100 * number + length)),
            num_prompt_tokens=length,
            max_tokens=1,
            params=SamplingParams(),
            seed=0,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset(),
            block_table=list(range(first_page, first_page + pages)),
        )
        first_page += pages
        planned.append(Chunk(request=request, start=begin, count=count, num_sampled=1))
    rows = RequestRows(len(chunks))
    return StepInput.build(StepPlan(chunks=tuple(planned)), page_size=PAGE, rows=rows)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_token_is_computed_once_or_by_all(size):
    """A decode, a chunk after computed tokens, a short chunk, a chunk of an odd length."""
    step = step_of((5, 1), (16, 40), (0, 7), (0, 31))
    parts = [divide(step, rank, size, 8) for rank in range(size)]
    owned = [set(part.own_slots.tolist()) for part in parts]
    shared = [set(part.step.slots_T.tolist()) - own for part, own in zip(parts, owned, strict=True)]
    assert all(each == shared[0] for each in shared), "what is not divided is computed by all"
    assert sorted(set().union(*owned, shared[0])) == sorted(step.slots_T.tolist())
    assert sum(map(len, owned)) + len(shared[0]) == step.num_tokens
    assert len({len(each) for each in owned}) == 1
    gathered = np.concatenate([part.own_slots for part in parts])
    for part in parts:
        assert np.array_equal(part.all_slots, gathered)
        assert np.array_equal(
            part.step.token_ids_T[part.step.logits_rows_S], step.token_ids_T[step.logits_rows_S]
        )


def test_pieces_attend_as_in_the_whole_step():
    """Each row's position is the number of keys before it, as in the whole step."""
    step = step_of((16, 40), (3, 1))
    for rank in range(2):
        part = divide(step, rank, 2, 8).step
        for request in range(part.num_requests):
            rows = slice(*part.query_starts_R1[request : request + 2])
            positions = part.positions_T[rows]
            last = part.context_lengths_R[request] - 1
            assert np.array_equal(positions, np.arange(last + 1 - len(positions), last + 1))
            pages = part.block_tables_RX[request][positions // PAGE]
            assert np.array_equal(pages * PAGE + positions % PAGE, part.slots_T[rows])


def test_work_is_balanced_over_ranks():
    """Keys that a rank's rows see: equal up to the tokens that all compute."""
    step = step_of((0, 4001))
    pairs = []
    for rank in range(4):
        part = divide(step, rank, 4, 8).step
        pairs.append(int((part.positions_T + 1).sum()))
        assert part.num_tokens == 1001
    assert max(pairs) == min(pairs)
    assert sum(pairs) < 1.01 * int((step.positions_T + 1).sum())


def test_short_chunks_and_warm_ups_are_not_divided():
    assert divide(step_of((0, 7), (9, 1)), 0, 2, 8) is None
    assert divide(step_of((0, 8)), 0, 4, 1) is None, "eight pieces and a token are nine"
    padding = StepInput.padding(num_requests=1, count=64, max_context_len=64, page_size=PAGE)
    assert divide(padding, 0, 2, 8) is None


def test_memory_is_measured_with_whole_steps(tiny_model):
    """A step with images or prompt log probabilities is not divided, and needs as much."""
    context = SimpleNamespace(rank=0, size=2)
    runner = rank_runner(tiny_model("llama"), context=context, **TWO)
    step = step_of((0, 40))
    assert runner.own_batch(step)[0].num_tokens < 40
    assert runner.sample().own_batch(step)[0].num_tokens == 40


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_exchange_moves_the_bytes_of_slots(dtype):
    """Tensors of different strides and types, as of pages with scales."""

    class Cache:
        def __init__(self, rank):
            keys = torch.zeros(3, PAGE, 2, 4, dtype=torch.float32)
            scales = torch.zeros(3, 2, PAGE, dtype=torch.float16).transpose(1, 2)
            self.page_tensors = (keys.to(dtype), scales)
            for tensor in self.page_tensors:
                tensor[1 - rank, rank + 1] = rank + 1
                tensor[2, 7 * rank] = 5 + rank

    def work(communicator):
        cache = Cache(communicator.rank)
        own = {0: [PAGE + 1, 2 * PAGE], 1: [2, 2 * PAGE + 7]}
        exchange = KvExchange(
            communicator=communicator,
            own_slots_T=torch.tensor(own[communicator.rank]),
            all_slots_nT=torch.tensor(own[0] + own[1]),
        )
        exchange.exchange_(cache)
        return cache.page_tensors

    first, second = run_ranks(2, work)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
        flat = one.float().flatten(2).amax(-1).flatten()
        expected = torch.zeros(3 * PAGE)
        expected[[PAGE + 1, 2 * PAGE, 2, 2 * PAGE + 7]] = torch.tensor([1.0, 5, 2, 6])
        assert torch.equal(flat, expected)


def count_exchanges(monkeypatch):
    """Tokens of each exchange of rank 0."""
    exchange, found = KvExchange.exchange_, []

    def counting(self, cache):
        found.append(len(self.own_slots_T))
        exchange(self, cache)

    monkeypatch.setattr(KvExchange, "exchange_", counting)
    return found


@pytest.mark.exhaustive
def test_tokens_equal_one_rank(tiny_model, many, monkeypatch):
    """In chunks, with pages of others, preempted; drawn; log probabilities of prompts."""
    folder, prompts = tiny_model("llama"), make_prompts()
    alone, two = start(folder, **SMALL), many(folder, **SMALL, **TWO)
    counts = count_exchanges(monkeypatch)
    assert tokens(two, prompts) == tokens(alone, prompts)
    assert counts and min(counts) >= 2
    drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}
    assert tokens(two, prompts[:4], **drawn) == tokens(alone, prompts[:4], **drawn)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, detokenize=False)
    given = [{"prompt_token_ids": prompts[5]}]
    (one,), (other,) = (llm.generate(given, params, use_tqdm=False) for llm in (alone, two))
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    found = [
        [max(each.logprob for each in row.values()) for row in output.prompt_logprobs[1:]]
        for output in (one, other)
    ]
    assert np.allclose(*found, atol=1e-4)


def prompt_of_rank(folder, context=None, **settings):
    """Token and log probability after a prompt of 57, and the pages that it fills."""
    runner = rank_runner(folder, context=context, **settings)
    runner.allocate_pages(5)
    params = SamplingParams(temperature=0, logprobs=0)
    step = StepInput.of_sequence(list(range(3, 60)), [1, 4, 2, 3], page_size=16, params=params)
    handle = runner.launch(step)
    (token,), (logprobs,) = handle.result(), handle.logprobs()
    return token, logprobs.logprob, [each.clone() for each in runner.layer_caches.tensors()]


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *((family, 2) for family in QUICK),
        *(
            pytest.param(family, size, marks=pytest.mark.exhaustive)
            for family in TINY_FAMILIES
            if family not in (*STATES, "deepseek_v4")
            for size in (2, 4)
            if (family, size) not in [(quick, 2) for quick in QUICK]
        ),
    ],
)
def test_every_family(family, size, tiny_model):
    """Every rank has the pages of one that computes all; ranks are threads here."""
    folder = tiny_model(family)
    settings = TWO | {"prefill_context_parallel_size": size}
    token, logprob, pages = prompt_of_rank(folder)
    for found in run_ranks(size, lambda context: prompt_of_rank(folder, context, **settings)):
        assert found[0] == token and abs(found[1] - logprob) < 1e-4
        for ours, whole in zip(found[2], pages, strict=True):
            assert whole.any()
            floats = (each.view(torch.float32) for each in (ours, whole))
            assert torch.allclose(*floats, atol=1e-3, rtol=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int4"])
def test_quantized_kv_pages(kv_cache, tiny_model, many):
    settings = {**SMALL, "kv_cache_dtype": kv_cache}
    folder, prompts = tiny_model("llama"), make_prompts()
    want = tokens(start(folder, **settings), prompts)
    assert tokens(many(folder, **settings, **TWO), prompts) == want


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "tensor", "settings"),
    [
        ("llama", 1, FOUR),
        ("llama", 2, TWO),
        ("qwen3_moe", 2, TWO | WHOLE),
        ("llama", 1, TWO | {"kv_offload_gb": 0.01}),
    ],
    ids=["four", "tensor", "experts", "host"],
)
def test_combinations(family, tensor, settings, tiny_model, many):
    folder, prompts = tiny_model(family), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    llm = many(folder, tensor, **SMALL, **settings)
    assert [tokens(llm, prompts) for _ in range(2)] == [want, want]


@pytest.mark.exhaustive
def test_bits_with_batch_invariance(tiny_model, many):
    """Whichever rank computes a row, and with however many others."""
    folder, prompts = tiny_model("llama"), make_prompts()[4:8]
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, detokenize=False)
    found = []
    for begin, settings in ((start, {}), (many, TWO)):
        llm = begin(folder, batch_invariant=True, **SMALL, **settings)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        found.append(
            [
                [
                    (token, each.logprob)
                    for row in output.outputs[0].logprobs
                    for token, each in row.items()
                ]
                for output in outputs
            ]
        )
    assert found[0] == found[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_adapters(family, tiny_model, tmp_path, many):
    folder, prompts = tiny_model(family), make_prompts(6)
    loras = make_adapters(folder, tmp_path, 2)
    want = adapted(start(folder, **LORA, **SMALL), prompts, loras)
    assert adapted(many(folder, **LORA, **SMALL, **TWO), prompts, loras) == want


@pytest.mark.exhaustive
def test_sleep_and_updates(tiny_model, many, tmp_path):
    folder = tiny_model("llama")
    old_tokens, old_digests = reference(folder)
    llm = many(folder, **SETTINGS, **TWO)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        assert tokens(llm, PROMPTS) == old_tokens
    llm.update_weights(str(folder))
    assert tokens(llm, PROMPTS) == old_tokens and digests_of(llm) == old_digests


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "llama",
            {"pipeline_parallel_size": 2},
            "--pipeline-parallel-size: does not work with --prefill-context-parallel-size 2",
        ),
        (
            "llama",
            {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 2})},
            "--speculative-config: does not work with --prefill-context-parallel-size 2",
        ),
        ("qwen3_next", {}, "--prefill-context-parallel-size"),
    ],
)
def test_unsupported_settings_are_refused_by_name(family, settings, message, tiny_model):
    from qserve.engine.engine import Engine

    config = EngineConfig(model=str(tiny_model(family)), device="cpu", **TWO, **settings)
    with pytest.raises(InputError, match=message):
        Engine(config)
