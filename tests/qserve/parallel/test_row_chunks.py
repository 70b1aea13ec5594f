"""Products of many rows whose sum over ranks is under way while they are computed."""

import pytest
import torch

from qserve.engine.distributed import executors
from qserve.engine.runner.graphs.cuda_graphs import LONG_CHUNK_SIZES
from qserve.lora.request import LoRARequest
from qserve.model.blocks.linear import FloatLinear, RowParallel, SplitLinear
from qserve.parallel import row_chunks
from qserve.parallel.row_chunks import ALIGNMENT, MIN_ROWS
from qserve.parallel.torch_communicator import GatheredSum
from tests.adapters import write_adapter
from tests.qserve.parallel import rank_of_small_chunks
from tests.qserve.parallel.engines import SMALL, make_prompts, tokens

exhaustive = pytest.mark.exhaustive


@pytest.mark.parametrize("rows", [MIN_ROWS, MIN_ROWS + 1, 4097, 5000, 8000, 8192, 100_003])
def test_chunks_cover_all_rows(rows):
    found = row_chunks.row_chunks(rows)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == rows and 3 <= len(found) <= 4
    assert all(stop % ALIGNMENT == 0 for _, stop in found[:-1])
    sizes = [stop - start for start, stop in found]
    assert min(sizes) >= ALIGNMENT // 2 and max(sizes) < 0.5 * rows
    assert sizes[-1] <= 0.2 * rows  # what is left to send at the end


def test_few_rows_are_not_divided():
    assert row_chunks.row_chunks(MIN_ROWS - 1) == []
    assert max(LONG_CHUNK_SIZES) < MIN_ROWS, "a CUDA graph cannot capture the sum"


@pytest.fixture
def small_chunks(monkeypatch):
    """Small chunks on all ranks. Returns the row counts of chunks that the leader has sent."""
    sent = []
    send = GatheredSum.send

    def noted(self, start, stop):
        sent.append(stop - start)
        send(self, start, stop)

    monkeypatch.setattr(GatheredSum, "send", noted)
    monkeypatch.setattr(row_chunks, "MIN_ROWS", rank_of_small_chunks.MIN_ROWS)
    monkeypatch.setattr(row_chunks, "ALIGNMENT", rank_of_small_chunks.ALIGNMENT)
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.rank_of_small_chunks")
    return sent


def with_and_without(llm, prompts, sent):
    """Tokens and logits with the overlap, then without."""
    found = []
    for overlaps in (True, False):
        llm.engine.workers.overlap_sums(overlaps)
        llm.reset_prefix_cache()
        sent.clear()
        found.append((tokens(llm, prompts), llm.logits(prompts[-1])))
        assert bool(sent) == overlaps
    return found


def test_same_tokens_and_logits_without_the_overlap(quantized_5m, many, small_chunks, monkeypatch):
    """Steps of 24 tokens; --batch-invariant, so that products have the same bits, too.

    Then a chunk is missing on this rank alone, which shows.
    """
    llm = many(quantized_5m, 2, batch_invariant=True, **SMALL)
    prompts = make_prompts(6)[4:]
    (ours, logits), (theirs, expected) = with_and_without(llm, prompts, small_chunks)
    assert ours == theirs and torch.equal(logits, expected)

    llm.engine.workers.overlap_sums(True)
    prompt = list(range(3, 27))  # one step
    small_chunks.clear()
    want, total = llm.logits(prompt), GatheredSum.total
    layers = len(llm.engine.workers.runner.decoder.layers)
    chunks = [stop - start for start, stop in row_chunks.row_chunks(len(prompt))]
    assert len(chunks) > 2 and small_chunks == 2 * layers * chunks

    def lacking(self):
        work, found = self._sent[1]
        work.wait()
        self._sent[1] = work, [found[0], torch.zeros_like(found[1])]
        return total(self)

    monkeypatch.setattr(GatheredSum, "total", lacking)
    assert not torch.allclose(llm.logits(prompt), want, atol=1e-2)


@exhaustive
@pytest.mark.parametrize(
    "family", ["gemma3", "gemma3n", "glm4", "olmo2", "gpt_oss", "qwen2_moe", "falcon_h1", "cohere"]
)
def test_families(family, tiny_model, many, small_chunks):
    """Norms after a branch, parallel layers, experts, and two mixers of one layer."""
    has_bits = family != "gemma3n"  # does not work with --batch-invariant
    llm = many(tiny_model(family), 2, batch_invariant=has_bits, **SMALL)
    (ours, logits), (theirs, expected) = with_and_without(llm, make_prompts(), small_chunks)
    assert ours == theirs
    assert torch.allclose(logits, expected, rtol=0, atol=0 if has_bits else 1e-4)


@exhaustive
@pytest.mark.parametrize("scheme", ["w8a8", "w4a16-asym", "w8a16-sym"])
def test_schemes(scheme, written, many, small_chunks):
    """With w8a8 the product reads codes, of which each chunk takes its rows."""
    folder = written(scheme, "compressed-tensors")
    llm = many(folder, 2, batch_invariant=True, **SMALL)
    (ours, logits), (theirs, expected) = with_and_without(llm, make_prompts(), small_chunks)
    assert ours == theirs and torch.equal(logits, expected)


@exhaustive
def test_steps_with_adapters_are_not_divided(quantized_5m, many, small_chunks, tmp_path):
    """Adapters are applied to all rows of a step together."""
    lora = LoRARequest("a", 1, str(write_adapter(quantized_5m, tmp_path / "adapter", size=1.0)))
    llm = many(quantized_5m, 2, batch_invariant=True, enable_lora=True, **SMALL)
    prompts = make_prompts()
    (ours, logits), (theirs, expected) = with_and_without(llm, prompts, small_chunks)
    assert ours == theirs and torch.equal(logits, expected)
    llm.engine.workers.overlap_sums(True)
    small_chunks.clear()
    llm.reset_prefix_cache()
    adapted = tokens(llm, prompts, lora)
    assert not small_chunks and adapted != ours


def test_linear_without_chunks_is_summed_at_the_next_norm(small_chunks):
    class Communicator:
        def begin_sum(self, x):
            raise AssertionError("a sum was begun")

    x = torch.ones(rank_of_small_chunks.MIN_ROWS, 4)
    linears = [FloatLinear(torch.ones(6, 4)) for _ in range(2)]
    found = RowParallel(SplitLinear(linears), Communicator())(x)
    assert found.x.shape == (len(x), 12) and found.row_sum is None
