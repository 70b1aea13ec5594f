"""Prefix cache and scheduler: which request finds which pages, and when. One test per hazard."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import InputError
from qserve.engine.kv_cache.block_pool import NULL_PAGE, BlockPool
from qserve.engine.kv_cache.prefix_cache import PrefixCache, extend_keys, root_key
from qserve.engine.request import Status
from qserve.lora.adapter import Adapter
from tests.qserve.engine.simulation import EOS, Simulation, make_request, make_scheduler

PAGE = 4
PREFIX = list(range(200, 200 + 4 * PAGE))


def simulate(depth=0, **settings):
    settings = {"num_pages": 64, "page_size": PAGE, "budget": 64} | settings
    return Simulation(make_scheduler(**settings), depth, count(1000))


def run(simulation, *requests):
    for request in requests:
        simulation.scheduler.add(request)
    simulation.run_out()


def counts(plan):
    return {chunk.request.request_id: (chunk.start, chunk.count) for chunk in plan.chunks}


def test_second_request_computes_only_uncached_tokens():
    simulation = simulate()
    run(simulation, make_request("first", [*PREFIX, 1, 2]))
    second = make_request("second", [*PREFIX, 3, 4, 5])
    simulation.scheduler.add(second)
    assert counts(simulation.scheduler.schedule()) == {"second": (len(PREFIX), 3)}
    assert second.facts.num_cached == len(PREFIX)
    assert simulation.scheduler.cache.take_counts() == (18 + 19, 16)
    assert simulation.scheduler.cache.take_counts() == (0, 0)


@pytest.mark.parametrize("length", [len(PREFIX), len(PREFIX) - 1, len(PREFIX) + 1])
def test_fully_cached_prompt_recomputes_last_token(length):
    """In a page of its own: a shared one is not written to, not even with the same values."""
    simulation = simulate()
    run(simulation, make_request("first", [*PREFIX, 1]))
    again = make_request("again", [*PREFIX, 1][:length])
    simulation.scheduler.add(again)
    cached = (length - 1) // PAGE * PAGE
    assert counts(simulation.scheduler.schedule()) == {"again": (cached, length - cached)}


def test_reloaded_adapter_misses_old_pages():
    """Nor when its prompt is that of the request before, whose keys need not be made again."""
    simulation, adapter = simulate(), Adapter(name="a", path="/a", generation="old")
    found = {}
    for generation in ("old", "old", "new", "new", "old"):
        adapter.generation = generation
        request = make_request(f"{len(found)} {generation}", [*PREFIX, 1])
        request.adapter = adapter
        run(simulation, request)
        found[request.request_id] = request.facts.num_cached
    assert list(found.values()) == [0, len(PREFIX), 0, len(PREFIX), len(PREFIX)]


def test_next_chat_turn_hits_output_pages():
    """All of them that were fed back: the last one of an output never was."""
    simulation = simulate(depth=1)
    turn = make_request("turn", PREFIX, max_tokens=9)
    run(simulation, turn)
    following = make_request("next", [*turn.token_ids, 5, 5])
    run(simulation, following)
    assert following.facts.num_cached == (len(PREFIX) + 8) // PAGE * PAGE


def test_page_is_shared_within_the_step_that_fills_it():
    simulation = simulate(budget=32)
    simulation.scheduler.add(make_request("r0", [*PREFIX, 1], group="a"))
    simulation.scheduler.add(make_request("r1", [*PREFIX, 2], group="b"))
    simulation.step()
    assert simulation.num_shared_in_step == 1
    simulation.run_out()


def test_request_waits_for_shared_prefix_in_computation():
    """The others are computed meanwhile; once it is cached, it delays no request."""
    simulation = simulate(budget=8, max_num_seqs=4)
    for name in ("r0", "r1", "r2"):
        simulation.scheduler.add(make_request(name, [*PREFIX, 1], group=name))
    assert counts(simulation.scheduler.schedule()) == {"r0": (0, 8)}
    simulation.scheduler.add(make_request("other", 3, group="other"))
    assert counts(simulation.scheduler.schedule()) == {"r0": (8, 5), "other": (0, 3)}
    assert counts(simulation.scheduler.schedule()) == {
        "other": (3, 1),
        "r0": (13, 4),
        "r1": (16, 1),
        "r2": (16, 1),
    }


def test_request_that_waits_for_pages_does_not_wait_forever():
    """If the request that computes the pages is aborted, it computes them itself."""
    simulation = simulate(budget=8)
    first, second = (make_request(name, [*PREFIX, 1], group=name) for name in ("r0", "r1"))
    simulation.scheduler.add(first)
    simulation.scheduler.add(second)
    simulation.step()
    simulation.scheduler.finish(first)
    assert counts(simulation.scheduler.schedule()) == {"r1": (8, 8)}


def test_abort_during_prompt_caches_only_full_pages():
    simulation = simulate(budget=10)
    first = make_request("r0", [*PREFIX, 1])
    simulation.scheduler.add(first)
    simulation.step()
    simulation.scheduler.finish(first)
    second = make_request("r1", [*PREFIX, 1])
    run(simulation, second)
    assert second.facts.num_cached == 8


def test_in_flight_token_is_not_hashed():
    """The step that writes its page is in flight: the page's key is not known yet."""
    simulation = simulate(depth=1)
    request = make_request("r0", PREFIX[:3], max_tokens=40)
    simulation.scheduler.add(request)
    published = []
    for _ in range(12):
        simulation.step()
        published.append((request.num_inserted, request.num_known, request.num_computed))
    for num_inserted, num_known, num_computed in published:
        assert num_inserted * PAGE <= min(num_known, num_computed)
    assert published[-1][0] > 1


def test_different_salts_share_no_pages():
    simulation = simulate()
    run(simulation, make_request("a", [*PREFIX, 1], cache_salt="one"))
    for name, salt, hit in (("b", "two", 0), ("c", "", 0), ("d", "one", 16), ("e", "", 16)):
        request = make_request(name, [*PREFIX, 1], cache_salt=salt)
        run(simulation, request)
        assert request.facts.num_cached == hit, salt


def test_prompt_logprobs_skip_cache_reads_but_fill_cache():
    simulation = simulate()
    run(simulation, make_request("a", [*PREFIX, 1]))
    request = make_request("b", [*PREFIX, 1])
    request.reads_cache = False
    run(simulation, request)
    assert request.facts.num_cached == 0 and simulation.num_shared_in_step == 0


def test_outputs_of_one_prompt_share_pages_and_hash_once(monkeypatch):
    simulation = simulate()
    requests = [make_request(f"r{n}", [*PREFIX, 1], max_tokens=6, group="n") for n in range(4)]
    run(simulation, *requests)
    assert [request.facts.num_cached for request in requests] == [0, 16, 16, 16]
    assert all(request.page_keys is not requests[0].page_keys for request in requests[1:])


def test_hit_pages_are_not_reallocated_for_same_prompt():
    """They are touched before anything is allocated: all others are free and older or younger."""
    simulation = simulate(num_pages=8, max_num_seqs=1, budget=64)
    run(simulation, make_request("a", [*PREFIX, 1], max_tokens=1))
    run(simulation, make_request("b", 15, max_tokens=1))
    again = make_request("c", [*PREFIX, *range(50, 65)], max_tokens=1)
    run(simulation, again)  # the simulation checks every key that is read
    assert again.facts.num_cached == 16


def test_hit_on_referenced_page_needs_no_free_page():
    simulation = simulate(num_pages=7, max_num_seqs=2, budget=64)
    scheduler = simulation.scheduler
    scheduler.add(make_request("a", [*PREFIX, 1], max_tokens=3))
    simulation.step()
    assert scheduler.pool.num_free == 2
    scheduler.add(make_request("b", [*PREFIX, 1, 2], max_tokens=2))
    simulation.step()
    assert len(scheduler.running) == 2, "five pages, of which four are there"
    simulation.run_out()


def test_eviction_takes_oldest_tail_page_first():
    pool = BlockPool(6, 1)
    old, young = [], []
    pool.grow_(old, 3)
    pool.grow_(young, 3)
    keys = [bytes([n]) for n in range(6)]
    for page, key in zip([*old, *young], keys, strict=True):
        pool.insert(page, key)
    pages = [*old, *young]
    pool.release_(old)
    pool.release_(young)
    found = pool.match(keys[:1])
    pool.share_(old, found)
    pool.release_(old)
    taken = []
    pool.grow_(taken, 4)
    assert taken == [pages[2], pages[1], pages[5], pages[4]]
    assert pool.match(keys[:3]) == [pages[0]] and pool.match(keys[3:]) == [pages[3]]
    pool.check_integrity([taken])


def test_duplicate_pages_are_kept_and_one_is_hit():
    pool = BlockPool(4, 1)
    first, second = [], []
    pool.grow_(first, 1)
    pool.grow_(second, 1)
    pool.insert(first[0], b"key")
    pool.insert(second[0], b"key")
    assert pool.match([b"key"]) == first
    pool.check_integrity([first, second])
    pool.release_(second)
    pool.release_(first)
    assert pool.num_cached == 1
    pool.check_integrity([])


def test_preempted_request_hits_its_pages():
    """It finds its pages that were not evicted; that does not count as a hit of a new request."""
    simulation = simulate(depth=1, num_pages=10, max_num_seqs=3)
    scheduler = simulation.scheduler
    for name, prompt, max_tokens in (("r0", 9, 8), ("r1", 9, 8), ("r2", 13, 8)):
        scheduler.add(make_request(name, prompt, max_tokens=max_tokens))
    restarts = []
    while scheduler.num_requests or simulation.in_flight:
        before = {request: request.num_computed for request in scheduler.waiting}
        for chunk in simulation.step().chunks:
            if chunk.request in before and chunk.request.facts.num_preemptions:
                restarts.append(chunk.start)
    assert restarts and any(start >= PAGE for start in restarts)
    assert scheduler.cache.take_counts() == (9 + 9 + 13, 0)


def test_reset_clears_cache_and_keeps_running_requests():
    simulation = simulate(depth=1, max_num_seqs=2)
    scheduler = simulation.scheduler
    running = make_request("r0", [*PREFIX, 1], max_tokens=30)
    waiting = make_request("r1", [*PREFIX, 1])
    scheduler.add(running)
    simulation.step()
    scheduler.add(waiting)
    scheduler.reset_prefix_cache()
    scheduler.check_integrity()
    simulation.run_until(lambda: "r1" in simulation.done)
    assert waiting.facts.num_cached == 0
    later = make_request("r2", [*PREFIX, 1])
    scheduler.add(later)
    simulation.run_out()
    assert later.facts.num_cached == 16, "of r1, which came after the reset"
    following = make_request("r3", [*running.token_ids, 5])
    run(simulation, following)
    assert following.facts.num_cached == 16, "not of r0, whose pages are from before"


def test_failed_request_pages_are_not_hit():
    """Its logits were NaN, so its keys may be NaN, too."""
    scheduler = make_scheduler(num_pages=64, budget=64)
    bad = make_request("bad", [*PREFIX, 1], max_tokens=9)
    scheduler.add(bad)
    (event,) = scheduler.update(scheduler.schedule(), ["NaN"])
    assert event.finish_reason == "error" and scheduler.pool.num_cached == 0
    scheduler.check_integrity()
    again = make_request("again", [*PREFIX, 1])
    scheduler.add(again)
    scheduler.schedule()
    assert again.facts.num_cached == 0


@pytest.mark.parametrize("num_slots", [0, 8])
def test_pages_outside_the_window_of_a_failed_request_are_not_found(num_slots):
    """They are in the cache or on the host. Pages of other requests are still found."""
    num_pages = 5 if num_slots else 8
    simulation = simulate(num_pages=num_pages, budget=PAGE, window=PAGE, num_slots=num_slots)
    scheduler, pool = simulation.scheduler, simulation.scheduler.pool
    run(simulation, other := make_request("other", 2 * PAGE + 1, max_tokens=1))
    failed = make_request("failed", [*PREFIX, 1], max_tokens=3)
    scheduler.add(failed)
    while failed.num_computed < len(PREFIX):
        simulation.step()
    assert failed.block_table[:2] == [NULL_PAGE] * 2
    assert len(pool.match(failed.page_keys)) == 4
    if num_slots:  # another takes those that it has given back
        pool.grow_(taken := [], 2 * PAGE)
        pool.release_(taken)
        assert pool.host.match(failed.page_keys) == 2

    def is_found(key):
        return bool(pool.match([key]) or (pool.host and pool.host.match([key])))

    scheduler.fail(failed, "its logits are NaN")
    scheduler.check_integrity()
    assert not any(map(is_found, failed.page_keys)) and all(map(is_found, other.page_keys))
    run(simulation, again := make_request("again", [*PREFIX, 1], max_tokens=3))
    assert again.facts.num_cached == 0


def test_disabled_cache_keeps_no_pages():
    simulation = simulate(prefix_caching=False)
    for name in "ab":
        request = make_request(name, [*PREFIX, 1])
        run(simulation, request)
        assert request.facts.num_cached == 0 and not request.page_keys
    assert simulation.scheduler.pool.num_cached == 0
    assert simulation.scheduler.cache.take_counts() == (0, 0)


def test_keys_depend_on_all_tokens_before_and_on_the_root():
    tokens = list(range(12))

    def keys(tokens, **root):
        found = []
        extend_keys(found, tokens, page_size=4, last=root_key(**root))
        return found

    whole = keys(tokens)
    assert len(whole) == 3 and len(set(whole)) == 3 and {len(key) for key in whole} == {32}
    assert keys(tokens[:11]) == whole[:2]
    partly = whole[:1]
    extend_keys(partly, tokens, page_size=4, last=partly[-1])
    assert partly == whole
    assert not set(whole) & set(keys([*tokens[:4], *tokens[:8]])[1:])
    assert not set(whole) & set(keys(tokens[4:])), "the same tokens at other positions"
    roots = [{}, {"salt": "a"}, {"adapter": "a"}, {"generation": 1}, {"salt": "a", "adapter": "a"}]
    assert len({key for root in roots for key in keys(tokens, **root)}) == 3 * len(roots)


@pytest.mark.exhaustive
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_traces_with_sharing(data):
    """Prompts of common beginnings, turns of chats, aborts, resets and too few pages.

    The simulation moves every key as the device would, and checks each one that is read.
    """
    draw = data.draw
    page_size = draw(st.sampled_from([1, 2, 4]))
    num_pages, max_num_seqs = draw(st.integers(4, 24)), draw(st.integers(1, 6))
    scheduler = make_scheduler(
        num_pages,
        page_size,
        max_num_seqs,
        budget=max_num_seqs + draw(st.integers(0, 20)),
        num_slots=draw(st.sampled_from([0, 1, 3, 40])),
    )
    random = draw(st.randoms(use_true_random=False))
    tokens = iter(lambda: random.choice([1, 2, 3, EOS]), None)
    simulation = Simulation(scheduler, depth=draw(st.sampled_from([0, 1])), tokens=tokens)
    texts = [[random.choice([1, 2, 3]) for _ in range(40)] for _ in range(3)]
    requests = []
    for number in range(draw(st.integers(2, 14))):
        if requests and random.random() < 0.3:
            prompt = [*random.choice(requests).token_ids, 4][-40:]
        else:
            prompt = random.choice(texts)[: random.randint(1, 40)]
        request = make_request(
            f"r{number}",
            prompt,
            max_tokens=random.randint(1, 12),
            group=random.choice(["", "a"]),
            cache_salt=random.choice(["", "", "salt"]),
            ignore_eos=False,
        )
        try:
            scheduler.add(request)
            requests.append(request)
        except InputError:
            continue
        for _ in range(random.randint(0, 4)):
            simulation.step()
        if random.random() < 0.2:
            victim = random.choice(requests)
            if victim.status is not Status.FINISHED:
                scheduler.finish(victim)
        if random.random() < 0.1:
            scheduler.reset_prefix_cache()
    simulation.run_out()
    scheduler.check_integrity()
    assert scheduler.pool.num_free == num_pages


def test_drafter_keys_exclude_last_page():
    """A drafter's key of a page's last position depends on the next token, which may differ."""
    pool = BlockPool(20, 4)
    cache = PrefixCache(pool, looks_ahead=True)
    first = make_request("a", 14)
    cache.add(first)
    cache.take_(first)
    first.num_computed = 14
    cache.insert(first)
    second = make_request("b", 14)
    second.token_ids = list(first.token_ids)
    cache.add(second)
    assert cache.num_cached(second) == 8, "three pages are there"
    cache.take_(second)
    assert second.num_computed == 8 and second.block_table[:2] == first.block_table[:2]
    assert not set(second.block_table[2:]) & set(first.block_table)
    pool.check_integrity([first.block_table, second.block_table])
