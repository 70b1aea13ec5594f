"""Engines of models with states exchange pages and snapshots of states."""

import json
from dataclasses import replace

import pytest

from qserve.engine.kv_cache import state_snapshots
from tests.qserve.kv_transfer.test_engines import GREEDY, ONE, PAGE, run
from tests.qserve.parallel.engines import start
from tests.qserve.speculation.hybrid_mtp_model import make_hybrid_mtp

PROMPT = list(range(5, 46))  # 10 pages and a token
exhaustive = pytest.mark.exhaustive
FAMILIES = ["granite_hybrid", "lfm2", "falcon_h1", "nemotron_h", "qwen3_next"]
FAMILIES += ["kimi_linear", "ling_3", "minimax", "olmo_hybrid", "jamba"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Copies of a few tokens are worth while."""
    monkeypatch.setattr(state_snapshots, "SPACING", 8)
    monkeypatch.setattr(state_snapshots, "MIN_GAIN", 4)


@pytest.fixture(scope="module")
def cold(tiny_model):
    """Family or folder -> what prompts are continued with, without any cache."""
    made = {}

    def tokens(family, *prompts):
        folder = family if "/" in str(family) else tiny_model(family)
        llm = made.setdefault(family, start(folder, num_state_snapshots=0))
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, replace(GREEDY, detokenize=False), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return tokens


@pytest.mark.parametrize(
    ("family", "steps_in_flight"),
    [
        ("qwen3_5", 0),
        ("qwen3_5", 1),
        *(pytest.param(each, 1, marks=exhaustive) for each in FAMILIES),
    ],
)
def test_second_engine_decodes_from_pages_of_first(
    family, steps_in_flight, make_engine, tiny_model, cold, tmp_path
):
    """And the next turn, which begins in the other's output."""
    settings = {"steps_in_flight": steps_in_flight, "model": tiny_model(family)}
    first = make_engine(tmp_path, "kv_producer", **settings)
    run(first, [PROMPT], ONE)
    second = make_engine(tmp_path, "kv_both", **settings)
    found, cached = run(second, [PROMPT])
    assert cached == [40] and found == cold(family, PROMPT)
    turn = PROMPT + found[0] + [7, 8, 9]
    third = make_engine(tmp_path, "kv_consumer", **settings)
    again, cached = run(third, [turn])
    assert cached[0] >= 40 and again == cold(family, turn)


def pages_of_host(engine):
    """Slots that are reserved or free on the host, of pages and of states."""
    tiers = engine.scheduler.pool.host, engine.scheduler.snapshots.host
    return [(len(tier._free) + len(tier), tier._num_reserved) for tier in tiers]


@pytest.mark.parametrize("lost", ["states", "pages", "load"])
def test_missing_states_are_recomputed(lost, memory_connector, make_engine, tiny_model, cold):
    """Pages without the states after them are not loaded, and no slot is lost."""
    first = make_engine(model=tiny_model("qwen3_5"))
    run(first, [PROMPT], ONE)
    second = make_engine(model=tiny_model("qwen3_5"))
    before = pages_of_host(second)
    page_bytes = first.runner.layer_caches.page_copies.page_bytes
    if lost == "load":
        memory_connector.fails = ("load",)
    else:
        gone = [
            key
            for key, page in memory_connector.pages.items()
            if (len(page) != page_bytes) == (lost == "states")
        ]
        assert len(gone) == (1 if lost == "states" else 10)
        for key in gone:
            del memory_connector.pages[key]
    found, cached = run(second, [PROMPT])
    assert cached == [0] and found == cold("qwen3_5", PROMPT)
    assert pages_of_host(second) == before
    if lost != "load":
        assert second.scheduler.pool.host.num_loaded == 0


def test_shallower_snapshot_is_loaded_if_deepest_pages_are_missing(
    memory_connector, make_engine, tiny_model, cold
):
    first = make_engine(model=tiny_model("qwen3_5"))
    run(first, [PROMPT], ONE)
    early = set(memory_connector.pages)
    longer = PROMPT + PROMPT[::-1]
    run(first, [longer], ONE)
    page_bytes = first.runner.layer_caches.page_copies.page_bytes
    late = [key for key, page in memory_connector.pages.items() if key not in early]
    del memory_connector.pages[
        next(key for key in late if len(memory_connector.pages[key]) == page_bytes)
    ]
    found, cached = run(make_engine(model=tiny_model("qwen3_5")), [longer])
    assert cached == [40] and found == cold("qwen3_5", longer)


def test_equal_prompts_fetch_once(memory_connector, make_engine, tiny_model, cold):
    run(make_engine(model=tiny_model("qwen3_5")), [PROMPT], ONE)
    engine = make_engine(model=tiny_model("qwen3_5"))
    prompts = [PROMPT, [*PROMPT, 3], [*PROMPT[:41], 9, 9]]
    found, cached = run(engine, prompts)
    assert cached == [40] * 3 and found == cold("qwen3_5", *prompts)


def test_snapshot_is_loaded_if_pages_are_local(memory_connector, make_engine, tiny_model, cold):
    run(make_engine(model=tiny_model("qwen3_5")), [PROMPT], ONE)
    engine = make_engine(model=tiny_model("qwen3_5"), num_state_snapshots=1)
    run(engine, [PROMPT])
    snapshots = engine.scheduler.snapshots
    snapshots.drop_all()
    found, cached = run(engine, [PROMPT])
    assert cached == [40] and found == cold("qwen3_5", PROMPT)


def test_too_many_pages_for_the_host_are_computed(memory_connector, make_engine, tiny_model, cold):
    """Half of them are not enough: a state follows the last."""
    prompt = PROMPT + PROMPT[::-1]  # 20 pages
    run(make_engine(model=tiny_model("qwen3_5")), [prompt], ONE)
    engine = make_engine(model=tiny_model("qwen3_5"), kv_offload_gb=0.0001)
    assert engine.scheduler.pool.host.num_slots // 2 < 20
    before = pages_of_host(engine)
    found, cached = run(engine, [prompt])
    assert cached == [0] and found == cold("qwen3_5", prompt)
    assert pages_of_host(engine) == before


@exhaustive
@pytest.mark.parametrize("size", [1, 2])
def test_with_drafts_and_on_ranks(size, cold, tmp_path):
    folder = make_hybrid_mtp(tmp_path / "mtp", "qwen3_5", 0.5)
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    extra = {"path": str(tmp_path / "pages")}
    transfer = {"kv_connector": "folder", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    want = cold(str(folder), PROMPT)
    for expected in (0, 40):
        llm = start(
            folder,
            size,
            block_size=PAGE,
            num_gpu_blocks_override=60,
            speculative_config=json.dumps(drafts),
            kv_transfer_config=json.dumps(transfer),
        )
        try:
            params = replace(GREEDY, detokenize=False)
            (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
            assert list(output.outputs[0].token_ids) == want[0]
            assert output.num_cached_tokens == expected
            for future in list(llm.engine._remote_kv._writes):
                future.result(60)
        finally:
            llm.close()
