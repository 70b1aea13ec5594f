"""A scheduler driven as the engine does it, with a model of the KV memory that checks each step."""

from collections import deque
from operator import attrgetter

from qserve.engine.kv_pages import PagePool
from qserve.engine.request import Request, Status
from qserve.engine.scheduler import Scheduler
from qserve.sampling_params import SamplingParams

EOS = 7


def make_request(name, prompt=4, max_tokens=4, client="", group="", **params):
    return Request(
        request_id=name,
        token_ids=[1] * prompt,
        num_prompt_tokens=prompt,
        max_tokens=max_tokens,
        params=SamplingParams(max_tokens=max_tokens, **params),
        seed=0,
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        eos_token_ids=frozenset([EOS]),
        client=client,
        group=group,
    )


def make_scheduler(num_pages=16, page_size=4, max_num_seqs=4, budget=8):
    return Scheduler(
        PagePool(num_pages, page_size), max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
    )


class Simulation:
    """Drives a scheduler as the engine does, with `depth` steps in flight, and checks each step."""

    def __init__(self, scheduler, depth, tokens):
        self.scheduler, self.depth, self.tokens = scheduler, depth, tokens
        self.in_flight = deque()
        self.done = {}
        self.admitted = []
        # (page, offset) -> (request, position): what a step wrote there; None: do not check
        self.memory = {}

    def step(self):
        scheduler = self.scheduler
        had_work = bool(scheduler.num_requests)
        decodes = [r for r in scheduler.running if r.num_uncomputed == 1]
        prompts = {r: r.num_uncomputed for r in scheduler.running if r.num_uncomputed > 1}
        plan = scheduler.schedule()
        scheduler.check_integrity()
        self.check_plan(plan)
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
                self.check_memory(chunk)
        requests = (*self.scheduler.running, *self.scheduler.waiting)
        if len({request.flow for request in requests}) == 1:
            order = [int(request.request_id[1:]) for request in requests]
            assert order == sorted(order), "first come, first served"

    def check_shares(self, plan, decodes, prompts):
        """Who had a token to compute did; the oldest prompt got half of what decodes left."""
        counts = {chunk.request: chunk.count for chunk in plan.chunks}
        for request in decodes:
            assert request in counts or request in plan.preempted, "a decode skipped a step"
        left = self.scheduler.max_num_batched_tokens - sum(
            counts.get(request, 0) for request in decodes
        )
        kept = [request for request in prompts if request not in plan.preempted]
        oldest = min(kept, key=attrgetter("num_steps_at_arrival"), default=None)
        if oldest is not None and not any(
            request.num_steps_at_arrival < oldest.num_steps_at_arrival for request in plan.admitted
        ):
            assert counts[oldest] >= min(prompts[oldest], left // 2)

    def check_memory(self, chunk):
        """Write the chunk's keys; then every key that its last row reads must be its own."""
        size, table = self.scheduler.pool.page_size, chunk.request.block_table
        name = chunk.request.request_id
        for position in range(chunk.start, chunk.end):
            self.memory[table[position // size], position % size] = (name, position)
        window = self.scheduler.window or chunk.end
        for position in range(max(0, chunk.start - window + 1), chunk.end):
            slot = (table[position // size], position % size)
            assert self.memory.get(slot) == (name, position), "a key was lost or overwritten"

    def run_out(self):
        self.run_until(lambda: not self.scheduler.num_requests and not self.in_flight)

    def run_until(self, condition, limit=20_000):
        for _ in range(limit):
            if condition():
                return
            self.step()
        raise AssertionError(f"it did not come to that in {limit} steps")
