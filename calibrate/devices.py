"""Divide the work of a run among devices, with one thread per device.

With a single device everything runs in the caller's thread.
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

ALL = "all"  # GPUs visible under CUDA_VISIBLE_DEVICES
KINDS = ("cpu", "cuda")
POLL = 0.05  # seconds between checks for failures while waiting
Result = TypeVar("Result")


class Stopped(Exception):
    """This device's work is cancelled, because another device failed or the user interrupted."""


@dataclass(frozen=True, slots=True)
class Devices:
    """One or more devices of the same type. The first one does the work that is not divided."""

    names: tuple[str, ...]
    _stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def parse(cls, text: str | Sequence[str]) -> "Devices":
        """Parse names, comma-separated names, or "all" GPUs. Raises InputError."""
        if text == ALL:
            text = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
            if not text:
                raise InputError(f"device {ALL!r}", "no GPU is visible", "use cpu")
        names = tuple(each.strip() for each in (text.split(",") if isinstance(text, str) else text))
        if not names:
            raise InputError("device", "expected one or more, found none", "use cpu")
        devices = [_checked(name) for name in names]
        if len({device.type for device in devices}) > 1:
            raise InputError(
                f"device {','.join(names)!r}",
                "expected only GPUs or only CPUs, since all devices must compute in one dtype",
                "remove the CPU",
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
        """ "cpu" or "cuda"; devices of one kind compute in the same dtype."""
        return torch.device(self.first).type

    def check(self) -> None:
        """Raise Stopped if the work is cancelled. Jobs call this between pieces of work."""
        if self._stop.is_set():
            raise Stopped

    def together(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run one job per device in parallel, and return the results in order.

        If a job raises, the others stop at their next check(), and then its exception is raised.
        """
        if len(jobs) <= 1:
            return [job() for job in jobs]
        if self.kind == "cuda":
            # torch loads its linear algebra on first use, and fails if two threads do so
            # concurrently ("lazy wrapper should be called at most once").
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
                # All jobs have ended, one has failed, or the user has interrupted the wait.
                self._stop.set()
        self._stop.clear()
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, Stopped):
                raise error
        return [future.result() for future in futures]


class OrderedSections:
    """Orders sections of several threads: for each key, sections run in the order of their number.

    Numbers start at 0.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` is called while waiting; it must raise if the awaited section will never run."""
        self._check = check
        self._condition = threading.Condition()
        self._next: Counter[Hashable] = Counter()

    @contextmanager
    def of(self, key: Hashable, number: int) -> Iterator[None]:
        """Wait until section `number` - 1 of `key` has ended, and hold a lock in the section."""
        with self._condition:
            while self._next[key] != number:
                self._check()
                self._condition.wait(POLL)
            yield
            self._next[key] += 1
            self._condition.notify_all()


ONE = Devices(("cpu",))  # a single device: no work is divided, no tensor is moved


def _on(name: str, job: Callable[[], Result]) -> Result:
    """Run a job with `name` as torch's current device."""
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
