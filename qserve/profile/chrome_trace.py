"""Analysis of a Chrome trace: busy time by kernel and operator class, gaps, steps.

Kernels may overlap (programmatic launch, side streams). Overlapping time counts only for the kernel
that started first, so that the times of all kernels and gaps add up to the span.
"""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from formats.errors import InputError, one_line
from qserve.profile.operator_classes import class_of

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
STEP_PREFIX = "step "  # start of the names of the recorder's ranges


class Interval(NamedTuple):
    """A named time span, in microseconds."""

    start: float
    end: float
    name: str


@dataclass(slots=True, kw_only=True)
class KernelTime:
    """Total time and number of calls of one kernel."""

    name: str
    us: float = 0.0  # microseconds without overlap with earlier kernels
    calls: int = 0

    @property
    def kind(self) -> str:
        return class_of(self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """Times between the start of the first kernel and the end of the last one, in microseconds."""

    span_us: float
    busy_us: float
    on_device: bool  # False: the trace has CPU operators instead of kernels
    kernels: list[KernelTime]  # longest first
    step_names: list[str] = field(default_factory=list)
    # idle time of the device between two steps
    step_gaps_us: list[float] = field(default_factory=list)

    @property
    def gap_us(self) -> float:
        return self.span_us - self.busy_us

    @property
    def classes(self) -> dict[str, tuple[float, int]]:
        """Operator class -> microseconds, number of calls; longest first."""
        found: dict[str, list] = defaultdict(lambda: [0.0, 0])
        for kernel in self.kernels:
            found[kernel.kind][0] += kernel.us
            found[kernel.kind][1] += kernel.calls
        ordered = sorted(found.items(), key=lambda item: -item[1][0])
        return {name: (us, calls) for name, (us, calls) in ordered}

    def to_dict(self) -> dict[str, Any]:
        return {
            "span_us": self.span_us,
            "busy_us": self.busy_us,
            "gap_us": self.gap_us,
            "on_device": self.on_device,
            "num_steps": len(self.step_names),
            "step_gaps_us": self.step_gaps_us,
            "classes": {
                name: {"us": us, "calls": calls, "pct": 100 * us / self.span_us}
                for name, (us, calls) in self.classes.items()
            },
            "kernels": [
                {
                    "name": each.name,
                    "class": each.kind,
                    "us": each.us,
                    "pct": 100 * each.us / self.span_us,
                    "calls": each.calls,
                }
                for each in self.kernels
            ],
        }


def read_trace(path: str | Path) -> list[dict]:
    """Read the complete events (ph "X") of a trace, plain or gzip. Raises InputError."""
    try:
        data = Path(path).read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        events = content["traceEvents"] if isinstance(content, dict) else content
        return [each for each in events if each.get("ph") == "X"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise InputError(
            str(path),
            f"expected a chrome trace (traceEvents): {one_line(error)}",
            "give a .pt.trace.json or .json.gz file of torch.profiler",
        ) from None


def summarize(path: str | Path) -> TraceSummary:
    """Summarize a trace. Raises InputError if it contains no kernels and no operators."""
    events = read_trace(path)
    device = [_interval(each) for each in events if each.get("cat") in DEVICE]
    ran = device or _outermost(events)
    if not ran:
        raise InputError(
            str(path),
            "contains neither kernels nor operators",
            "record the trace while the model computes",
        )
    ran.sort()
    kernels, busy = _shares(ran)
    steps = sorted(
        _interval(each)
        for each in events
        if each.get("cat") == "user_annotation" and each["name"].startswith(STEP_PREFIX)
    )
    return TraceSummary(
        span_us=max(each.end for each in ran) - ran[0].start,
        busy_us=busy,
        on_device=bool(device),
        kernels=sorted(kernels, key=lambda kernel: -kernel.us),
        step_names=[step.name for step in steps],
        step_gaps_us=_gaps(events, steps) if device else [],
    )


def _interval(event: dict) -> Interval:
    return Interval(event["ts"], event["ts"] + event.get("dur", 0), event["name"])


def _outermost(events: Iterable[dict]) -> list[Interval]:
    """Return the CPU operators that no other operator calls, of all threads."""
    of_thread: dict[object, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            of_thread[event.get("tid")].append(_interval(event))
    found = []
    for ran in of_thread.values():
        end = 0.0
        for each in sorted(ran, key=lambda each: (each.start, -each.end)):
            if each.start >= end:
                found.append(each)
                end = each.end
    return found


def _shares(ran: list[Interval]) -> tuple[list[KernelTime], float]:
    """Return the time of each kernel without overlap, and the total."""
    kernels: dict[str, KernelTime] = {}
    end, busy = ran[0].start, 0.0
    for each in ran:
        own = max(0.0, each.end - max(each.start, end))
        end = max(end, each.end)
        kernel = kernels.setdefault(each.name, KernelTime(name=each.name))
        kernel.us += own
        kernel.calls += 1
        busy += own
    return list(kernels.values()), busy


def _gaps(events: list[dict], steps: list[Interval]) -> list[float]:
    """Return the device's idle times between the last kernel of a step and the first of the next.

    A kernel belongs to the step whose range contains the kernel's launch. Kernel and launch have
    the same correlation id.
    """
    launches = {
        each["args"]["correlation"]: each["ts"]
        for each in events
        if each.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in each["args"]
    }
    starts = [step.start for step in steps]
    of_step: dict[int, list[Interval]] = defaultdict(list)
    for each in events:
        launched = launches.get(each.get("args", {}).get("correlation"))
        if each.get("cat") != "kernel" or launched is None:
            continue
        index = bisect_right(starts, launched) - 1
        if index >= 0 and launched <= steps[index].end:
            of_step[index].append(_interval(each))
    ends = [
        (min(each.start for each in ran), max(each.end for each in ran))
        for _, ran in sorted(of_step.items())
    ]
    return [max(0.0, after[0] - before[1]) for before, after in pairwise(ends)]
