"""Cycles of sleep, wake, pause and update under load: no lost request, and no growing memory."""

import gc
import random
from pathlib import Path

import pytest

from qserve.config import EngineConfig
from qserve.engine.control import commands
from qserve.engine.engine import Engine
from tests.qserve.engine.control.driven import GREEDY, Clock, Driven
from tests.qserve.engine.control.new_weights import changed, written

NUM_PROMPTS = 6
FLAT_AFTER, MOST_GROWTH = 50, 4 * 2**20  # cycles; bytes


def prompt(number: int) -> list[int]:
    return [(7 * number + 3 * i) % 500 + 3 for i in range(4 + number)]


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Load:
    """Requests that keep coming, and the version of the weights at the start and end of each."""

    def __init__(self, folders: list[Path], quantization: str | None) -> None:
        self.quantization = quantization
        self.folders, self.random = folders, random.Random(3)
        self.engine = self._engine(folders[0])
        self.driven = Driven(self.engine, Clock())
        self.wanted = [self._tokens(folder) for folder in folders]
        self.which = 0  # of the folders, whose weights are in use
        self.num_updates = 0
        self.started: dict[str, tuple[int, int]] = {}  # number of the prompt, updates before
        self.num_compared = self.num_crossed = 0

    def _engine(self, folder: Path) -> Engine:
        config = EngineConfig(
            model=str(folder),
            quantization=self.quantization,
            block_size=4,
            num_gpu_blocks_override=40,
            max_num_seqs=4,
        )
        return Engine(config)

    def _tokens(self, folder: Path) -> list[list[int]]:
        driven = Driven(self._engine(folder), Clock())
        for number in range(NUM_PROMPTS):
            driven.engine.add_request(str(number), prompt(number), GREEDY)
        driven.run_out()
        return [driven.tokens(str(number)) for number in range(NUM_PROMPTS)]

    def add(self, cycle: int) -> None:
        for index in range(self.random.randint(1, 5)):
            name, number = f"{cycle}-{index}", self.random.randrange(NUM_PROMPTS)
            self.engine.add_request(name, prompt(number), GREEDY)
            self.started[name] = number, self.num_updates

    def tell(self, command: commands.AnyCommand) -> None:
        number = self.driven.tell(command)
        while not self.driven.is_done(number):
            self.step()
        assert self.driven.finished[-1].error is None
        if isinstance(command, commands.UpdateWeights):
            self.which = self.folders.index(Path(command.folder))
            self.num_updates += 1
        self.driven.finished.clear()

    def step(self) -> None:
        self.driven.step()
        for event in self.driven.events:
            if event.finish_reason is not None:
                self.check(event.request_id)
        ended = {e.request_id for e in self.driven.events if e.finish_reason is not None}
        self.driven.events = [e for e in self.driven.events if e.request_id not in ended]

    def check(self, name: str) -> None:
        number, num_updates = self.started.pop(name)
        assert self.driven.ending(name) == "length"
        got = self.driven.tokens(name)
        if num_updates != self.num_updates:  # an update that kept it came between
            assert len(got) == GREEDY.max_tokens
            self.num_crossed += 1
        else:
            assert got == self.wanted[self.which][number]
            self.num_compared += 1

    def cycle(self, number: int) -> None:
        choice = self.random.choice
        self.add(number)
        for _ in range(self.random.randrange(4)):
            self.step()
        if choice((True, False)):
            self.tell(commands.Sleep(level=choice((1, 2)), mode=choice(("wait", "keep"))))
            self.add(-number)
            self.tell(commands.WakeUp())
        if choice((True, False)):
            self.tell(commands.PauseGeneration(mode="keep"))
            self.tell(commands.ResumeGeneration())
        folder = str(choice(self.folders))
        self.tell(commands.UpdateWeights(folder=folder, mode=choice(("wait", "keep"))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("cycles", "quantization"),
    [(4, "w4a16-auto"), pytest.param(200, None, marks=pytest.mark.exhaustive)],  # floats: faster
)
def test_update_cycles_lose_no_request_and_no_memory(cycles, quantization, tiny_model, tmp_path):
    folder = tiny_model("qwen3")
    load = Load([folder, written(changed(folder), folder, tmp_path / "new")], quantization)
    for number in range(1, cycles + 1):
        load.cycle(number)
        if number == FLAT_AFTER:
            before = resident_bytes()
    while load.engine.has_work():
        load.step()
    assert load.started == {}, "requests were lost"
    assert load.num_compared > cycles and load.num_crossed
    assert load.engine.report().num_pages_used == 0
    load.engine.scheduler.check_integrity()
    if cycles > FLAT_AFTER:
        assert resident_bytes() - before < MOST_GROWTH
