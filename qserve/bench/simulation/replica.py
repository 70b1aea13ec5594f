"""Replica: runs the engine's own scheduler and page pool on a virtual clock. Loads no torch.

As in the engine (qserve/engine/engine.py), a step may run while the next one is planned. So a
request that arrives while a step runs is planned one step later, and the scheduler sees a sampled
token one step late.
"""

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from qserve.bench.steps.step_times import StepTimes
from qserve.engine.request import Request
from qserve.engine.scheduling.plan import StepPlan
from qserve.engine.scheduling.scheduler import Scheduler
from qserve.params.sampling_params import SamplingParams

TOKEN, END = 7, 8  # the sampled tokens; END ends an output
Watch = Callable[[float, StepPlan, float], None]  # called with (start, plan, end)


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedRequest:
    """A request and its outcome. Times are seconds of the virtual clock."""

    name: str
    arrival: float
    input_len: int  # in tokens
    output_len: int  # in tokens
    prompt: list[int] | None = None  # None: any tokens, since the prompt shares no prefix
    sent: float = 0.0  # arrival plus the server's overhead
    first_token: float = 0.0
    last_token: float = 0.0
    token_times: array = field(default_factory=lambda: array("d"))
    num_preemptions: int = 0

    def to_request(self, max_tokens: int | None) -> Request:
        """Return the engine's request.

        `max_tokens`: limit that the request states; its output ends earlier, with END. None: the
        limit is the output length.
        """
        prompt = [0] * self.input_len if self.prompt is None else list(self.prompt)
        most = self.output_len if max_tokens is None else max(max_tokens, self.output_len)
        params = SamplingParams(max_tokens=most, ignore_eos=max_tokens is None)
        return Request(
            request_id=self.name,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_tokens=most,
            params=params,
            seed=0,
            stop_token_ids=frozenset(),
            eos_token_ids=frozenset() if max_tokens is None else frozenset((END,)),
            group=self.name,
            arrived=self.arrival,
        )


class Replica:
    """One simulated server."""

    def __init__(
        self,
        scheduler: Scheduler,
        times: StepTimes,
        *,
        steps_in_flight: int = 1,
        keep_times: bool = True,
        watch: Watch | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Create an idle server.

        `steps_in_flight`: number of steps that may run while the next one is planned. `keep_times`:
        record the time of each token. `watch`: called for each step. `max_tokens`: see
        SimulatedRequest.to_request.
        """
        self.scheduler = scheduler
        self._max_tokens = max_tokens
        self.clock = 0.0
        self.num_steps = self.num_preempted = self.peak_pages = 0
        self.busy_seconds = 0.0
        self._times = times
        self._depth = steps_in_flight
        self._keep_times, self._watch = keep_times, watch
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._free_at = 0.0  # time at which the device finishes the launched steps
        self._open: dict[str, SimulatedRequest] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.num_requests > 0

    def add(self, request: SimulatedRequest) -> None:
        """Add a request to the queue. Raises InputError if it can never run."""
        if not self.has_work:
            self.clock = max(self.clock, request.sent)
        self.scheduler.add(request.to_request(self._max_tokens))
        self._open[request.name] = request

    def step(self) -> list[SimulatedRequest]:
        """Simulate Engine.step. Return the requests that ended; `clock` is then their end."""
        plan = self.scheduler.schedule()
        for each in plan.preempted:
            self._open[each.request_id].num_preemptions += 1
        self.num_preempted += len(plan.preempted)
        if plan.chunks:
            start = max(self.clock, self._free_at)
            seconds = self._times.of_plan(plan)
            self._free_at = start + seconds
            self._in_flight.append((plan, self._free_at))
            self.num_steps += 1
            self.busy_seconds += seconds
            pool = self.scheduler.pool
            self.peak_pages = max(self.peak_pages, pool.num_pages - pool.num_free)
            if self._watch is not None:
                self._watch(start, plan, self._free_at)
        ended: list[SimulatedRequest] = []
        num_left = self._depth if plan.chunks else 0
        while len(self._in_flight) > num_left:
            done, at = self._in_flight.popleft()
            self.clock = max(self.clock, at)
            ended += self._take(done)
        return ended

    def _take(self, plan: StepPlan) -> list[SimulatedRequest]:
        ended = []
        sampled = [self._token(chunk.request) for chunk in plan.chunks if chunk.num_sampled]
        for event in self.scheduler.update(plan, sampled):
            request = self._open[event.request_id]
            if not request.first_token:
                request.first_token = self.clock
            request.last_token = self.clock
            if self._keep_times:
                request.token_times.append(self.clock)
            if event.finish_reason is not None:
                ended.append(self._open.pop(event.request_id))
        return ended

    def _token(self, request: Request) -> int:
        """Return the token that a step sampled for a request."""
        if self._max_tokens is None or request.request_id not in self._open:
            return TOKEN  # no END is needed, or an earlier step ended the request
        num_output = request.num_known - request.num_prompt_tokens
        return END if num_output + 1 == self._open[request.request_id].output_len else TOKEN
