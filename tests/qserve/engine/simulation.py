"""A scheduler driven as the engine does it, with a model of the KV memory that checks each step."""

import zlib
from collections import defaultdict, deque

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.kv_cache.host_tier import HostTier
from qserve.engine.request import Request, Status
from qserve.engine.scheduling.policies import Policy
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.params.sampling_params import SamplingParams

EOS = 7


def make_request(
    name, prompt=4, max_tokens=4, client="", group="", priority=0, cache_salt="", **params
):
    """`prompt`: its tokens, or how many of its own that no other request has."""
    if isinstance(prompt, int):
        seed = zlib.crc32(name.encode())
        prompt = [100 + (seed + 7919 * place) % 30_000 for place in range(prompt)]
    return Request(
        request_id=name,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=0,
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        eos_token_ids=frozenset([EOS]),
        client=client,
        group=group,
        priority=priority,
        cache_salt=cache_salt,
    )


def make_scheduler(num_pages=16, page_size=4, max_num_seqs=4, budget=8, num_slots=0, **settings):
    host = HostTier(num_slots) if num_slots else None
    return Scheduler(
        BlockPool(num_pages, page_size, host),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        **settings,
    )


class Simulation:
    """Drives a scheduler as the engine does, with `depth` steps in flight, and checks each step."""

    def __init__(self, scheduler, depth, tokens):
        self.scheduler, self.depth, self.tokens = scheduler, depth, tokens
        self.in_flight = deque()
        self.done = {}
        self.admitted = []
        # page -> offset -> (request, position): what a step wrote there; None: do not check
        self.memory = defaultdict(dict)
        self.host = {}  # slot -> the same of a page
        self.num_shared_in_step = 0  # chunks that read keys of another chunk of their step

    def step(self):
        scheduler = self.scheduler
        had_work = bool(scheduler.num_requests)
        decodes = [r for r in scheduler.running if r.num_uncomputed == 1]
        prompts = {r: r.num_uncomputed for r in scheduler.running if r.num_uncomputed > 1}
        plan = scheduler.schedule()
        scheduler.check_integrity()
        self.check_plan(plan)
        if type(scheduler.policy).phase is Policy.phase:  # its steps are mixed
            self.check_shares(plan, decodes, prompts)
        self.admitted += plan.admitted
        if plan.chunks:
            self.in_flight.append(plan)
        due = self.depth if plan.chunks else 0
        progress = bool(plan.chunks or self.in_flight)
        assert progress or not had_work, "a step neither ran nor finished anything"
        while len(self.in_flight) > due:
            old = self.in_flight.popleft()
            num_sampled = sum(chunk.num_sampled for chunk in old.chunks)
            sampled = [next(self.tokens) for _ in range(num_sampled)]
            for event in scheduler.update(old, sampled):
                if event.finish_reason:
                    assert event.request_id not in self.done
                    self.done[event.request_id] = event.finish_reason
            scheduler.check_integrity()
        return plan

    def check_plan(self, plan):
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len(plan.chunks) <= self.scheduler.max_num_seqs
        requests = [chunk.request for chunk in plan.chunks]
        assert len(set(map(id, requests))) == len(requests)
        for chunk in plan.chunks:
            assert chunk.count > 0
            assert chunk.request.status is Status.RUNNING
            table = chunk.request.block_table
            assert len(table) * self.scheduler.pool.page_size >= chunk.end
            assert chunk.end <= chunk.request.num_tokens
            assert chunk.request.num_computed == chunk.end
        if self.memory is not None:
            self.check_memory(plan)
        # Of those that gave way the one that loses least went first, which may not be the youngest.
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        requests = [request for request in requests if not request.facts.num_preemptions]
        names = [request.request_id for request in requests]
        is_numbered = all(name[:1] == "r" and name[1:].isdigit() for name in names)
        if len({request.flow for request in requests}) == 1 and is_numbered:
            order = [int(name[1:]) for name in names]
            assert order == sorted(order), "first come, first served"

    def check_shares(self, plan, decodes, prompts):
        """Every request with a token to compute ran; the oldest prompt got half of the remaining
        budget."""
        counts = {chunk.request: chunk.count for chunk in plan.chunks}
        for request in decodes:
            assert request in counts or request in plan.preempted, "a decode skipped a step"
        left = self.scheduler.max_num_batched_tokens - sum(
            counts.get(request, 0) for request in decodes
        )
        kept = [request for request in prompts if request not in plan.preempted]
        first = min((request.num_steps_at_arrival for request in kept), default=None)
        if first is not None and not any(
            request.num_steps_at_arrival < first for request in plan.admitted
        ):
            oldest = [request for request in kept if request.num_steps_at_arrival == first]
            assert any(counts.get(r, 0) >= min(prompts[r], left // 2) for r in oldest)

    def check_memory(self, plan):
        """Move pages and write all keys of the step; then every key that a row reads is its own.

        Where pages are shared: one of the same tokens, from the start on.
        """
        size = self.scheduler.pool.page_size
        if plan.moves is not None:
            moves = {name: getattr(plan.moves, name).tolist() for name in plan.moves.__slots__}
            for page, slot in zip(moves["stored_pages"], moves["stored_slots"], strict=True):
                self.host[slot] = dict(self.memory[page])
            for slot, page in zip(moves["loaded_slots"], moves["loaded_pages"], strict=True):
                self.memory[page] = dict(self.host[slot])
        written = set()
        for chunk in plan.chunks:
            table = chunk.request.block_table
            for position in range(chunk.start, chunk.end):
                page, offset = table[position // size], position % size
                assert (page, offset) not in written, "two rows write one slot"
                written.add((page, offset))
                self.memory[page][offset] = (chunk.request, position)
        for chunk in plan.chunks:
            request, table = chunk.request, chunk.request.block_table
            writers = set()
            first = max(0, chunk.start - (self.scheduler.window or chunk.end) + 1)
            for position in range(first, chunk.end):
                writer, at = self.memory[table[position // size]][position % size]
                assert at == position, "a key was lost or overwritten"
                writers.add(writer)
            for writer in writers - {request}:
                last = max(p for p in range(first, chunk.end) if self.writer(table, p) is writer)
                assert writer.token_ids[: last + 1] == request.token_ids[: last + 1]
                assert len(request.token_ids) > last, "read by one whose token is not known"
                assert writer.cache_salt == request.cache_salt
            in_step = {self.writer(table, p) for p in range(first, chunk.start)} & {
                each.request for each in plan.chunks if each.start < chunk.start
            }
            self.num_shared_in_step += bool(in_step - {request})

    def writer(self, table, position):
        size = self.scheduler.pool.page_size
        return self.memory[table[position // size]][position % size][0]

    def run_out(self):
        self.run_until(lambda: not self.scheduler.num_requests and not self.in_flight)

    def run_until(self, condition, limit=20_000):
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"it did not come to that in {limit} steps")
