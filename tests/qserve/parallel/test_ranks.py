"""Ranks in processes: the same tokens as one rank alone, and one clear end where a rank dies."""

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from formats.errors import InputError
from qserve.config import EngineConfig
from qserve.engine.distributed import executors
from qserve.engine.distributed.rank_channel import RankDiedError
from qserve.parallel.ranks import Ranks
from tests.qserve.parallel.engines import SMALL, make_prompts, start, tokens
from tests.qserve.parallel.test_sharing import SCHEMES
from tests.qserve.speculation.docs_heads import write_docs_head

WAIT_SECONDS = 60  # a guard against hanging, never reached
exhaustive = pytest.mark.exhaustive


def count(llm, monkeypatch):
    """Statistics of steps: preemptions, and tokens found in pages."""
    facts, counts = llm.engine._stats.facts_of, {"num_preempted": 0, "num_prefix_hits": 0}

    def counting(plan):
        found = facts(plan)
        for name in counts:
            counts[name] += found[name]
        return found

    monkeypatch.setattr(llm.engine._stats, "facts_of", counting)
    return counts


def test_tokens_equal_one_rank_and_rank_death_ends_engine(quantized_5m, many, monkeypatch):
    """In chunks, with pages of others and pages that run out; then sampled; then without a rank."""
    alone, two = start(quantized_5m, **SMALL), many(quantized_5m, 2, **SMALL)
    prompts = make_prompts()
    counts = count(two, monkeypatch)
    want = tokens(alone, prompts)
    assert tokens(two, prompts) == want
    assert all(counts.values()), counts
    assert tokens(two, prompts) == want, "asked for a second time"
    drawn = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.5}
    assert tokens(two, prompts[:4], **drawn) == tokens(alone, prompts[:4], **drawn)
    assert np.allclose(two.logits(prompts[5]), alone.logits(prompts[5]), atol=1e-3)

    (link,) = two.engine.workers._rank_group._links
    os.kill(link._handle._process.pid, signal.SIGKILL)
    with pytest.raises(RankDiedError, match="rank 1 died: its process ended with code -9"):
        for _ in range(1000):  # the first steps may be gone before the death is seen
            tokens(two, prompts[:1])
    with pytest.raises(Exception, match="a step failed"):
        two.check_health()


FAMILIES = ("llama", "gemma3", "glm4", "olmo2", "gpt_oss", "qwen2_moe", "laguna", "mimo_v2")
FAMILIES += ("gemma4_shared", "gemma3n", "step")


# test_sharing.py shards every family and scheme over threads; here is one of each kind.
@exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tiny_model, many):
    folder, prompts = tiny_model(family), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    assert tokens(many(folder, 2, **SMALL), prompts) == want


@exhaustive
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_four_ranks(family, tiny_model, many):
    folder, prompts = tiny_model(family), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    assert tokens(many(folder, 4, **SMALL), prompts) == want


@exhaustive
@pytest.mark.parametrize(
    "scheme", [name for name, (_, limit) in SCHEMES.items() if limit < 1e-3][::3]
)
def test_schemes(scheme, written, many):
    """Schemes whose inputs have no scale per token, which ranks would compute separately."""
    folder, prompts = written(scheme, SCHEMES[scheme][0]), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    assert tokens(many(folder, 2, **SMALL), prompts) == want


@exhaustive
@pytest.mark.parametrize(
    ("tensor", "stages", "family"),
    [(1, 2, "llama"), (1, 3, "gemma2"), (2, 2, "qwen3_moe"), (2, 2, "llama")],
)
def test_stages(tensor, stages, family, tiny_model, many):
    folder, prompts = tiny_model(family), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    assert tokens(many(folder, tensor, stages, **SMALL), prompts) == want


@exhaustive
@pytest.mark.parametrize("kv_cache", ["int8", "fp8", "int4"])
def test_quantized_kv_pages(kv_cache, tiny_model, many):
    settings = {**SMALL, "kv_cache_dtype": kv_cache}
    folder, prompts = tiny_model("llama"), make_prompts()
    want = tokens(start(folder, **settings), prompts)
    assert tokens(many(folder, 2, **settings), prompts) == want


@exhaustive
@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
def test_host_tier_pages(tensor, stages, tiny_model, many):
    settings = {**SMALL, "kv_offload_gb": 0.01}
    folder, prompts = tiny_model("llama"), make_prompts()
    want = tokens(start(folder), prompts)
    two = many(folder, tensor, stages, **settings)
    assert [tokens(two, prompts) for _ in range(2)] == [want, want]
    assert two.engine.scheduler.pool.host.num_loaded > 0


@exhaustive
@pytest.mark.parametrize("drafter", ["ngram", "eagle3", "dflash"])
def test_speculative_decoding_on_ranks(drafter, docs_5m, many, tmp_path):
    """Host drafts reach every rank; a head drafts on each of them, with the target's own tables."""
    config = {"method": "ngram", "num_speculative_tokens": 4}
    if drafter == "eagle3":
        config = {"model": str(docs_5m.parent / "docs-5m-eagle3"), "num_speculative_tokens": 3}
    if drafter == "dflash":
        head = write_docs_head(tmp_path, "dflash")
        config = {"model": str(head), "num_speculative_tokens": 3}
    prompts = [prompt * 2 for prompt in make_prompts(6)]
    want = tokens(start(docs_5m), prompts)
    assert tokens(many(docs_5m, 2, speculative_config=json.dumps(config)), prompts) == want


@exhaustive
def test_interrupted_step_ends_engine(tiny_model, many, monkeypatch):
    """The other rank is in the middle of it."""
    two = many(tiny_model("llama"), 2)

    def interrupt(step):
        raise KeyboardInterrupt

    monkeypatch.setattr(two.engine.workers._ours, "launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tokens(two, [[5, 6]])
    monkeypatch.undo()
    with pytest.raises(RankDiedError, match="rank 0 died: it was interrupted in a step"):
        tokens(two, [[5, 6]])


@exhaustive
def test_rank_that_cannot_start_is_reported(tiny_model, many, monkeypatch):
    monkeypatch.setattr(executors, "MODULE", "tests.qserve.parallel.failing_rank")
    with pytest.raises(InputError, match="rank 1: GPU memory: ran out while loading"):
        many(tiny_model("llama"), 2)
    gc.collect()
    monkeypatch.undo()
    assert tokens(many(tiny_model("llama"), 2), [[5, 6]]), "nothing of the first start is left"


@exhaustive
def test_leaders_own_failure_names_rank_0(tiny_model, many):
    with pytest.raises(InputError, match="rank 0: --cpu-kv-cache-memory"):
        many(tiny_model("llama"), 2, cpu_kv_cache_memory=1e-9)


@exhaustive
def test_second_rank_engine_in_process_is_refused(tiny_model, many):
    many(tiny_model("llama"), 2)
    with pytest.raises(InputError, match="already has a torch.distributed group"):
        many(tiny_model("llama"), 2)


@exhaustive
def test_rank_death_ends_server(docs_5m, tmp_path):
    """/health says 503, and the exit code is not 0."""
    import httpx

    from tests.conftest import Server

    flags = ("--device", "cpu", "--max-model-len", "64", "--tensor-parallel-size", "2")
    server = Server(docs_5m, tmp_path / "log", *flags)
    try:
        assert httpx.get(f"{server.url}/health").status_code == 200
        children = os.popen("pgrep -f 'rank_process.*--rank=1'").read().split()
        mine = [pid for pid in children if is_below(int(pid), server.process.pid)]
        assert len(mine) == 1
        os.kill(int(mine[0]), signal.SIGKILL)
        code = server.process.wait(WAIT_SECONDS)
        assert code != 0
    finally:
        server.process.kill()
        server.process.wait()
    assert "rank 1 died: its process ended with code -9" in (tmp_path / "log").read_text()


def is_below(pid, ancestor):
    """Return whether a process is a child of another, or a child's child."""
    while pid > 1:
        if pid == ancestor:
            return True
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return False


@exhaustive
def test_ranks_end_with_their_leader(tiny_model):
    two = start(tiny_model("llama"), 2)
    (link,) = two.engine.workers._rank_group._links
    process = link._handle._process
    del two, link
    gc.collect()
    until = time.monotonic() + WAIT_SECONDS
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() == 0


@pytest.fixture(scope="module")
def cluster():
    """A Ray cluster of this machine."""
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@exhaustive
def test_ray_places_ranks_and_reports_death(cluster, tiny_model, many):
    folder, prompts = tiny_model("llama"), make_prompts()
    want = tokens(start(folder, **SMALL), prompts)
    for _ in range(2):  # what the first had is given back
        two = many(folder, 2, distributed_executor_backend="ray", **SMALL)
        assert tokens(two, prompts) == want
        two.close()
    two = many(folder, 2, distributed_executor_backend="ray", **SMALL)
    (link,) = two.engine.workers._rank_group._links
    cluster.kill(link._handle._actor)
    with pytest.raises(RankDiedError, match="rank 1 died: its Ray actor is gone"):
        for _ in range(1000):
            tokens(two, prompts[:1])


@exhaustive
def test_ray_cluster_without_resources_is_reported(cluster, tiny_model, many, monkeypatch):
    from qserve.engine.distributed import ray_executor

    monkeypatch.setattr(ray_executor, "PLACE_SECONDS", 1.0)
    with pytest.raises(InputError, match="the cluster has no resources for 4 x"):
        many(tiny_model("llama"), 4, distributed_executor_backend="ray")


def test_meeting_file_stays_until_the_ranks_have_ended(tmp_path):
    """NCCL's monitor thread polls it, and a poll of a file that is gone blocks the exit."""
    executor = executors.ProcessExecutor(EngineConfig(model=str(tmp_path)), 32)
    folder, end = Path(executor.address.removeprefix("file://")).parent, executor.end
    del executor
    gc.collect()
    assert folder.is_dir()
    end()
    assert not folder.exists()


def test_process_groups_are_destroyed_by_one_thread(monkeypatch):
    """A dead rank's watcher aborts while the leader, which saw the same error, closes."""
    group = {"exists": True, "inside": 0, "most": 0, "aborted": 0}

    def end():
        group["inside"] += 1
        group["most"] = max(group["most"], group["inside"])
        time.sleep(0.05)
        group["inside"] -= 1
        group["exists"] = False
        group["aborted"] += 1

    monkeypatch.setattr(dist, "is_initialized", lambda: group["exists"])
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "destroy_process_group", end)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", end)
    ranks = Ranks(size=2)
    threads = [threading.Thread(target=work) for work in (ranks.abort, ranks.leave, ranks.close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (group["most"], group["aborted"]) == (1, 1)


def test_abort_ends_when_graphs_are_freed(monkeypatch):
    """NCCL waits for graphs that contain its operations, and their owner frees them afterwards."""
    begun, freed, aborted = (threading.Event() for _ in range(3))
    group = {"exists": True, "aborts": 0}

    def abort():
        group["aborts"] += 1
        begun.set()
        assert freed.wait(60)
        group["exists"] = False
        aborted.set()

    monkeypatch.setattr(dist, "is_initialized", lambda: group["exists"])
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: pytest.fail("it was aborted"))
    ranks = Ranks(size=2)
    ranks.abort()
    ranks.abort()
    assert begun.wait(60)
    assert not aborted.is_set()
    freed.set()
    ranks.leave()
    assert aborted.is_set() and group["aborts"] == 1
