"""The devices that a run computes on, and work that is shared out over them by threads.

Knows no model. One device works in the caller's thread, without any of this.
"""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from formats.errors import InputError

ALL = "all"  # GPUs that CUDA_VISIBLE_DEVICES leaves
KINDS = ("cpu", "cuda")
POLL = 0.05  # seconds after which one that waits looks whether another failed
Result = TypeVar("Result")


class Stopped(Exception):
    """Another device failed, or the user gave up: what this one does is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Devices:
    """One or more of a kind. The first holds what is not shared out."""

    names: tuple[str, ...]
    _stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> "Devices":
        """Names, or a text of them with commas, or "all" GPUs. Raises InputError."""
        if text == ALL:
            text = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
            if not text:
                raise InputError(f"device {ALL!r}", "there is no GPU", "use cpu")
        names = tuple(each.strip() for each in (text.split(",") if isinstance(text, str) else text))
        if not names:
            raise InputError("device", "expected one or more, found none", "use cpu")
        devices = [_checked(name) for name in names]
        if len({device.type for device in devices}) > 1:
            raise InputError(
                f"device {','.join(names)!r}",
                "expected devices of a kind, which compute in one dtype",
                "leave out the CPU",
            )
        gpus = [device for device in devices if device.type == "cuda"]
        if len(names) > 1 and len(set(map(_number, gpus))) < len(gpus):
            raise InputError(f"device {','.join(names)!r}", "names a GPU twice", "name it once")
        return cls(names)

    @property
    def first(self) -> str:
        return self.names[0]

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda": the same kind computes in the same dtype."""
        return torch.device(self.first).type

    def check(self) -> None:
        """To be called between pieces of work. Raises Stopped where it is not wanted any more."""
        if self._stop.is_set():
            raise Stopped

    def together(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run a job on each of the first devices, at once. Returns what they return, in order.

        Raises what the first of them raised when all have ended, the others at their next check().
        """
        if len(jobs) <= 1:
            return [job() for job in jobs]
        if self.kind == "cuda":
            # torch loads its linear algebra when that is first used, and two threads that do so at
            # once fail ("lazy wrapper should be called at most once").
            torch.linalg.cholesky_ex(torch.ones(1, 1, device=self.first))
        self._stop.clear()
        with ThreadPoolExecutor(len(jobs)) as pool:
            futures = [
                pool.submit(_on, name, job)
                for name, job in zip(self.names[: len(jobs)], jobs, strict=True)
            ]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            finally:
                # All have ended, or one has failed, or the user has interrupted the wait.
                self._stop.set()
        self._stop.clear()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, Stopped):
                raise error
        return [future.result() for future in futures]


class Turns:
    """Lets threads do numbered things in the order of their numbers, for each key on its own."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises where what is waited for will not come."""
        self._check = check
        self._condition = threading.Condition()
        self._next: Counter[Hashable] = Counter()

    @contextmanager
    def of(self, key: Hashable, number: int) -> Iterator[None]:
        """Wait until the one before has ended, then let nobody else in."""
        with self._condition:
            while self._next[key] != number:
                self._check()
                self._condition.wait(POLL)
            yield
            self._next[key] += 1
            self._condition.notify_all()


ONE = Devices(("cpu",))  # nothing is shared out, and so nothing is moved


def _on(name: str, job: Callable[[], Result]) -> Result:
    """In a thread whose kernels go to the device."""
    device = torch.device(name)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return job()


def _checked(name: str) -> torch.device:
    if name.partition(":")[0] not in KINDS:
        raise InputError(f"device {name!r}", "unknown", "use cpu, cuda, all or cuda:0,cuda:1")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
        raise InputError(f"device {name!r}", f"cannot be used: {problem}", "use cpu") from None
    return torch.device(name)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
