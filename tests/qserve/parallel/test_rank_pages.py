"""KV pages of ranks that leave the engine: each rank keeps and finds its own part."""

import json
from concurrent.futures import Future

import numpy as np
import pytest

from formats.errors import InputError
from qserve.engine.distributed.rank_channel import RankDiedError
from qserve.kv_transfer.shared_pages import SharedPages
from qserve.params.sampling_params import SamplingParams
from tests.qserve.parallel.engines import start

exhaustive = pytest.mark.exhaustive
PAGE = 4
PROMPT = list(range(5, 30))  # 6 pages and a token
KEYS = [bytes([number] * 32) for number in range(4)]


class FakeRank:
    """RankPages whose answers the test gives, as the rank's own or over the line."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        def ask(*values):
            self.asked.append((name, *values))
            self.future = Future()
            return self.future

        return ask


class FakeRankGroup:
    def __init__(self, ranks):
        self.ranks = ranks

    def begin(self, name, *values):
        return [getattr(rank, name.removesuffix("_pages"))(*values) for rank in self.ranks]


def test_page_matches_only_if_all_ranks_have_it():
    ranks = [FakeRank() for _ in range(3)]
    pages = SharedPages(ranks[0], FakeRankGroup(ranks[1:]), [8, 8, 16])
    found = pages.match(KEYS)
    for rank, count in zip(ranks, (4, 2, 3), strict=True):
        assert not found.done()
        assert np.array_equal(rank.asked[0][1], [[number] * 32 for number in range(4)])
        rank.future.set_result(count)
    assert found.result() == 2

    loaded = pages.load(KEYS[:3], [5, 6, 7])
    assert all(rank.asked[1][2] == [5, 6, 7] for rank in ranks)
    results = ((True, True, True), (True, True, False), (True, False, False))
    for rank, result in zip(ranks, results, strict=True):
        rank.future.set_result(result)
    assert loaded.result() == [True, False, False]

    found, saved = pages.match(KEYS), None
    for rank in ranks[:2]:
        rank.future.set_result(4)
    ranks[2].future.set_exception(RankDiedError("rank 2 is gone"))
    assert found.result() == 0, "nothing is there without a rank"
    saved = pages.save(KEYS[:1], [3])
    for rank in ranks:
        assert not saved.done()
        rank.future.set_result(None)
    assert saved.result() is None


def make(folder, path, many, tensor, stages, role="kv_both", **settings):
    extra = {"path": str(path)}
    transfer = {
        "kv_connector": "folder",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }
    settings = {"kv_transfer_config": json.dumps(transfer)} | settings
    return many(folder, tensor, stages, block_size=PAGE, num_gpu_blocks_override=60, **settings)


def answers(llm):
    """Tokens after PROMPT, and how many of it were found; the engine has written its pages."""
    params = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, False)
    remote = llm.engine._remote_kv
    for future in () if remote is None else list(remote._writes):
        future.result(60)
    return output.outputs[0].token_ids, output.num_cached_tokens


@exhaustive
@pytest.mark.parametrize(
    ("tensor", "stages", "kv_cache"),
    [(2, 1, "int8"), (2, 1, "int4"), (1, 2, "auto"), (2, 2, "auto")],
)
def test_second_engine_decodes_from_pages_of_first(
    tensor, stages, kv_cache, tiny_model, tmp_path, many
):
    folder, settings = tiny_model("llama"), {"kv_cache_dtype": kv_cache}
    want, _ = answers(start(folder, block_size=PAGE, **settings))
    first = make(folder, tmp_path, many, tensor, stages, "kv_producer", **settings)
    assert answers(first) == (want, 0)
    first.close()
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) >= 6 * tensor * stages, "a part of each rank"
    second = make(folder, tmp_path, many, tensor, stages, "kv_consumer", **settings)
    assert answers(second) == (want, 24)
    second.close()
    alone = make(folder, tmp_path, many, 1, 1, "kv_consumer", **settings)
    assert answers(alone) == (want, 0), "parts are no pages of one rank"
    # Two pages are of the answer: of those of the prompt some part is among these.
    for file in files[: 2 * tensor * stages + 1]:
        file.unlink()
    third = make(folder, tmp_path, many, tensor, stages, "kv_consumer", **settings)
    tokens, num_cached = answers(third)
    assert tokens == want and num_cached < 24, "a part of one rank is missing"


@exhaustive
def test_pages_of_other_sharding_are_not_hit(tiny_model, tmp_path, many):
    """Two stages and two parts of each layer have pages of equal sizes."""
    folder = tiny_model("qwen3")
    first = make(folder, tmp_path, many, 2, 1)
    want, _ = answers(first)
    first.close()
    assert answers(make(folder, tmp_path, many, 1, 2)) == (want, 0)


@exhaustive
def test_rank_with_failing_connector_is_reported(tiny_model, tmp_path, many, monkeypatch):
    monkeypatch.setattr(
        "qserve.engine.distributed.executors.MODULE", "tests.qserve.parallel.rank_without_connector"
    )
    with pytest.raises(InputError, match="rank 1: the store: is not reachable"):
        make(tiny_model("llama"), tmp_path, many, 2, 1)
