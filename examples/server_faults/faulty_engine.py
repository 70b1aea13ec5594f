"""Engine with faults that a prompt's first token triggers."""

import time
from pathlib import Path

from qserve.engine.engine import Engine
from qserve.engine.token_event import TokenEvent

NAN, KERNEL_ERROR, OUT_OF_MEMORY, HANG, EATS_MEMORY = 8001, 8002, 8003, 8004, 8005


class FaultyEngine(Engine):
    """Engine that fails in the step after a request with one of the tokens above at its start."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self._faults: dict[str, int] = {}

    def add_request(self, request_id, prompt_token_ids, *arguments, **options) -> None:
        super().add_request(request_id, prompt_token_ids, *arguments, **options)
        if NAN <= prompt_token_ids[0] <= EATS_MEMORY:
            self._faults[request_id] = prompt_token_ids[0]

    def step(self) -> list[TokenEvent]:
        events = super().step()
        for request_id, fault in self._faults.items():
            if fault == KERNEL_ERROR:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if fault == OUT_OF_MEMORY:
                raise MemoryError
            if fault == EATS_MEMORY:
                eat_memory()
            if fault == HANG:
                time.sleep(3600)
            self.abort(request_id)
            events = [event for event in events if event.request_id != request_id]
            events.append(
                TokenEvent(
                    request_id=request_id,
                    token_ids=(),
                    finish_reason="error",
                    error="the model's logits contain NaN",
                )
            )
        self._faults.clear()
        return events


def eat_memory() -> None:
    """Allocate memory until the system refuses; for processes with a memory limit."""
    eaten = []
    while True:
        eaten.append(bytearray(2**20))


def engine_pid(server_pid: int) -> int:
    """The engine's process, a child of the server's."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text()
    for pid in map(int, children.split()):
        if b"qserve.engine.ipc.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise ProcessLookupError(f"no engine below the process {server_pid}")
