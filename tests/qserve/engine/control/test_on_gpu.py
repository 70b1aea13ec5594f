"""Sleep, wake and new weights on a CUDA GPU: memory, CUDA graphs, tokens."""

import gc

import pytest
import torch

from formats.errors import InputError
from qserve import LLM, SamplingParams
from qserve.model.resident.leaves import leaves
from tests.qserve.engine.control.new_weights import changed, stored, written

pytestmark = pytest.mark.gpu

PROMPTS = [{"prompt_token_ids": list(range(5 + n, 12 + 2 * n))} for n in range(6)]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, detokenize=False)


def start(folder, **settings) -> LLM:
    return LLM(str(folder), device="cuda", max_num_seqs=8, num_gpu_blocks_override=4096, **settings)


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def reserved_bytes() -> int:
    """Return the memory of this process, since other tests may use the GPU at the same time."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what earlier tests' models held
    return torch.cuda.memory_reserved()


def addresses(llm: LLM) -> list[int]:
    found = leaves(llm.engine.runner.decoder)
    return [leaf.data_ptr() for _, leaf in found if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("quantization", ["w4a16-auto", "w8a8", None])
def test_updated_engine_equals_fresh_engine_and_keeps_graphs(quantization, docs_5m, tmp_path):
    new = changed(docs_5m)
    other = written(new, docs_5m, tmp_path / "new")
    fresh = start(other, quantization=quantization)
    wanted = tokens(fresh)
    llm = start(docs_5m, quantization=quantization)
    before, places = tokens(llm), addresses(llm)
    graphs = llm.engine.runner.graphs
    captured = graphs.num_captured
    llm.update_weights({name: tensor.cuda() for name, tensor in new.items()})
    assert tokens(llm) == wanted != before
    assert addresses(llm) == places
    assert llm.engine.runner.graphs is graphs and graphs.num_captured >= captured > 0
    llm.update_weights(docs_5m)
    assert tokens(llm) == before


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("eager", [False, True])
def test_sleep_frees_the_gpu(level, eager, docs_5m):
    llm = start(docs_5m, quantization="w4a16-auto", enforce_eager=eager)
    before, awake = tokens(llm), reserved_bytes()
    pages = 4096 * llm.engine.runner.bytes_per_page
    llm.sleep(level)
    assert awake - reserved_bytes() >= pages / 2  # the allocator may keep parts of segments
    assert not any(addresses(llm)[1:3])  # the embedding, the first norm
    llm.wake_up()
    assert tokens(llm) == before
    assert (llm.engine.runner.graphs is None) == eager


def test_pinned_memory_is_reused(docs_5m, tmp_path):
    llm = start(docs_5m, quantization="w4a16-auto")
    new = changed(docs_5m)
    fresh = tokens(start(written(new, docs_5m, tmp_path / "new"), quantization="w4a16-auto"))
    host, sizes = llm.engine.workers.residence.host, []
    for number in range(6):
        llm.sleep(1)
        assert host.take(1).is_pinned()
        llm.wake_up()
        llm.update_weights(stored(docs_5m) if number % 2 else new)
        assert (tokens(llm) == fresh) == (number % 2 == 0)
        sizes.append(host.num_bytes)
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_cycles_keep_memory_flat(docs_5m):
    llm = start(docs_5m, quantization="w4a16-auto")
    before, sizes = tokens(llm), []
    for number in range(12):
        llm.sleep(1 + number % 2)
        if number % 3 == 0:
            llm.update_weights(stored(docs_5m))
        llm.wake_up()
        assert tokens(llm) == before
        sizes.append(reserved_bytes())
    assert sizes[-1] - sizes[4] < 64 * 2**20


def test_wake_without_memory_fails_and_can_be_repeated(docs_5m):
    llm = start(docs_5m, quantization="w4a16-auto")
    before = tokens(llm)
    llm.sleep(1)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved_bytes() + 2**24) / total)
    try:
        with pytest.raises(InputError, match="ran out"):
            llm.wake_up()
        assert llm.is_sleeping()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    llm.wake_up()
    assert tokens(llm) == before
