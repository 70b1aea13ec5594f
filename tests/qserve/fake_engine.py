"""An engine without a model, for a real engine process: counts upwards from a prompt's last token.

The model's name and a prompt's first token say what goes wrong. It writes the messages that it
receives to the file named by FAKE_ENGINE_JOURNAL.
"""

import os
import signal
import time

from formats.errors import InputError
from qserve.engine.ipc import messages
from qserve.engine.report import EngineReport
from qserve.engine.token_event import TokenEvent
from qserve.params.request_options import DEFAULT

REFUSED, STEP_FAILS, PROCESS_DIES, STEP_HANGS, STEP_IS_SLOW = 100, 101, 102, 103, 104
OUT_OF_MEMORY, EATS_MEMORY, CANNOT_BE_ADDED = 105, 106, 107
VOCAB_SIZE = 8192
NUM_PAGES = 77


class FakeAdapters:
    """Reads a folder once there is one; a folder that is a file is none.

    The name says what goes wrong: "raises" in reading, "refused" in put.
    """

    def __init__(self, journal) -> None:
        self._journal = journal

    def read(self, path, is_wanted):
        self._journal(f"reads {os.path.basename(path)}")
        if os.path.basename(path) == "raises":
            raise OverflowError("int too large to convert to float")
        while not os.path.exists(path):
            if not is_wanted():
                self._journal(f"leaves {os.path.basename(path)}")
                raise InputError(path, "is not wanted")
            time.sleep(0.005)
        if not os.path.isdir(path):
            raise InputError(path, "is no adapter")
        return path

    digests: dict[str, str] = {}

    def put(self, name, path, packed, number) -> None:
        if name == "refused":
            raise RuntimeError("value cannot be converted to type float without overflow")
        self._journal(f"puts {name} {number}")


class FakeOperations:
    """Takes new weights of any folder but one called "wrong"."""

    is_sleeping = False
    fingerprint = "qs_fake"

    def __init__(self, journal) -> None:
        self._journal = journal
        self.version = "0"

    def stage(self, *, folder, version, digests):
        if os.path.basename(folder) == "wrong":
            raise InputError(folder, "holds another model")
        if os.path.basename(folder) == "raises":
            raise OverflowError("int too large to convert to float")
        return folder, version or "1"

    def commit(self, update) -> None:
        folder, self.version = update
        self._journal(f"uses {folder}")


class FakeProfiler:
    def start(self, config):
        raise RuntimeError("the profiler cannot start\nand a long explanation")

    def stop(self):
        pass


class FakeEngine:
    max_model_len = 2048
    vocab_size = VOCAB_SIZE

    def __init__(self, config) -> None:
        broken = os.environ.get("FAKE_ENGINE_UNUSABLE")
        if broken or config.model == "unusable" or config.max_model_len == 1:
            raise InputError("unusable/config.json", "no such architecture", "use another")
        if config.model == "broken":
            raise RuntimeError("out of memory\nand a long explanation")
        if config.model == "dies":
            os._exit(7)
        if config.model == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.model == "slow":
            time.sleep(60)
        if os.environ.get("FAKE_ENGINE_BREAKS_READER"):
            messages.receive = self._no_room
        self._running = {}
        self.adapters = FakeAdapters(self._journal)
        self.profiler = FakeProfiler()
        self.operations = FakeOperations(self._journal)
        self.is_paused = False
        self._journal(f"pid {os.getpid()}")
        self._journal(f"cpu_threads {config.cpu_threads}")

    @staticmethod
    def _no_room(connection, direction):
        connection.recv(1)
        raise MemoryError("no room")

    def _eat(self) -> None:
        """Take all memory that the system gives, down to the last kilobytes, and keep it."""
        self.eaten, size = [], 2**24
        while True:
            try:
                self.eaten.append(bytearray(size))
            except MemoryError:
                size //= 4
                if size < 2**10:
                    raise

    def _journal(self, line: str) -> None:
        path = os.environ.get("FAKE_ENGINE_JOURNAL")
        if path:
            with open(path, "a") as file:
                file.write(line + "\n")

    def add_request(
        self, request_id, prompt_token_ids, params, arrived, *, client, group, options
    ) -> None:
        if prompt_token_ids[0] == REFUSED:
            raise InputError(f"request {request_id}", "can never run", "shorten it")
        if prompt_token_ids[0] == CANNOT_BE_ADDED:
            raise OverflowError("int too large to convert to float")
        self._journal(f"add {request_id}")
        if client or group:
            self._journal(f"{request_id} is of {client}, {group}")
        if options != DEFAULT:
            self._journal(f"{request_id}: {options}")
        self._running[request_id] = [list(prompt_token_ids), 0, params]

    @property
    def is_drained(self) -> bool:
        return self.is_paused and not self._running

    def pause(self, mode) -> None:
        self._journal(f"pause {mode}")
        self.is_paused = True

    def resume(self) -> None:
        self._journal("resume")
        self.is_paused = False

    def recompute_all(self) -> None:
        self._journal("recompute")

    def reset_prefix_cache(self) -> None:
        self._journal("reset")

    def abort(self, request_id) -> None:
        self._journal(f"abort {request_id}")
        self._running.pop(request_id, None)

    def use_idle_time(self) -> bool:
        return False

    def has_work(self) -> bool:
        return bool(self._running)

    def report(self) -> EngineReport:
        return EngineReport(num_running=len(self._running), num_pages=NUM_PAGES)

    def step(self) -> list[TokenEvent]:
        time.sleep(0.001)
        events = []
        for request_id, state in list(self._running.items()):
            prompt, count, params = state
            if prompt[0] == STEP_FAILS and count == 2:
                raise RuntimeError("CUDA error: illegal address\nat 0xdeadbeef")
            if prompt[0] == OUT_OF_MEMORY and count == 2:
                raise MemoryError
            if prompt[0] == EATS_MEMORY and count == 2:
                self._eat()
            if prompt[0] == PROCESS_DIES and count == 2:
                os._exit(9)
            if prompt[0] == STEP_HANGS:
                time.sleep(60)
            if prompt[0] == STEP_IS_SLOW:
                time.sleep(0.05)
            state[1] = count = count + 1
            last = count == (params.max_tokens or 1000)
            events.append(
                TokenEvent(
                    request_id=request_id,
                    token_ids=((prompt[-1] + count) % VOCAB_SIZE,),
                    finish_reason="length" if last else None,
                )
            )
            if last:
                del self._running[request_id]
        return events
