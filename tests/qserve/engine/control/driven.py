"""An engine, its commands and its clock, driven by hand as the engine's process drives them."""

from qserve.engine.control import commands
from qserve.engine.control.command_queue import CommandQueue
from qserve.engine.engine import Engine
from qserve.engine.token_event import TokenEvent
from qserve.params.request_options import RequestOptions
from qserve.params.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [9, 8, 7, 6, 5, 4], "c": [50, 60, 70]}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Driven:
    """An engine, its commands, and what came out."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        self.queue = CommandQueue(engine)
        self.events: list[TokenEvent] = []
        self.finished: list = []
        self._numbers = 0

    def add(self, *names: str, **options) -> None:
        for name in names:
            given = {"options": RequestOptions(**options)} if options else {}
            self.engine.add_request(name, PROMPTS[name], GREEDY, **given)

    def tell(self, command: commands.AnyCommand) -> int:
        self._numbers += 1
        self.queue.add(self._numbers, command)
        self.finished += self.queue.advance()
        return self._numbers

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.events += self.engine.step()
            self.finished += self.queue.advance()

    def run_out(self) -> None:
        while self.engine.has_work():
            self.step()

    def is_done(self, number: int) -> bool:
        return any(done.number == number for done in self.finished)

    def tokens(self, name: str) -> list[int]:
        return [t for e in self.events if e.request_id == name for t in e.token_ids]

    def ending(self, name: str) -> str | None:
        endings = [e.finish_reason for e in self.events if e.request_id == name]
        assert endings.count(None) >= len(endings) - 1
        return endings[-1] if endings else None
