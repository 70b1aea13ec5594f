"""How a kernel is measured: a correctness check, inputs that are not in the L2, one CUDA graph.

A time is the median over replays of one CUDA graph, which makes one call on every copy of the
inputs. There are so many copies that none is still in the L2 cache at its next call: a decode step
also reads each weight once, from memory. A call with a wrong result is not timed. The floor is the
larger of bytes over bandwidth and operations over peak.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field

import torch

from qkernels.errors import KernelError
from qkernels.tuning.op import TunedOp

COLD_BYTES = 400e6  # an H200's L2 holds 60 MB
MAX_CALLS = 64  # most calls of a graph; small inputs stay in the cache, as they do in a model
REPLAYS = 15

Call = Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]


def itself(result: torch.Tensor) -> torch.Tensor:
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """Peak rates of one GPU, measured with torch, from which floors follow."""

    bytes_per_second: float
    operations_per_second: float  # bf16


CEILINGS = {"NVIDIA H200": Ceiling(bytes_per_second=4.4e12, operations_per_second=788e12)}


def time_calls(calls: list[Call], replays: int = REPLAYS) -> float:
    """Return the microseconds of one call, with all calls in one CUDA graph."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem: the calls to time, one per copy of the inputs, and the first call's result."""

    op: str
    shape: str
    m: int  # rows, or requests
    num_bytes: int  # bytes that are read or written once
    operations: int
    calls: list[Call]
    want: torch.Tensor  # expected result, in higher precision than the calls' results
    allowed_error: float
    values: Callable[..., torch.Tensor] = itself  # a call's result -> values to compare
    timer: Callable[[list[Call]], float] = time_calls  # calls -> microseconds of one call
    operation_rate: float = 1  # peak rate relative to bf16: 2 for products of 8-bit codes
    baselines: dict[str, list[Call]] = field(default_factory=dict)  # other ways to do the work
    # tunable operation (qkernels/tuning) and this problem's fields; None: nothing to tune
    tuned: tuple[TunedOp, dict[str, object]] | None = None


Baselines = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchedOp:
    """One benchmarked operation.

    `cases` yields the cases of one shape for several m and baselines.
    """

    cases: Callable[[str, tuple[int, ...], Baselines], Iterator[Case]]
    shapes: dict[str, object]
    default_m: dict[str, tuple[int, ...]]  # shape -> m
    baselines: tuple[str, ...]
    dims: int = 0  # how many numbers, joined by x, may replace a shape's name; 0: none

    def has_shape(self, shape: str) -> bool:
        numbers = shape.split("x")
        unnamed = len(numbers) == self.dims and all(n.isdecimal() and int(n) for n in numbers)
        return shape in self.shapes or unnamed

    def m_of(self, shape: str) -> tuple[int, ...]:
        """Return the default numbers of rows to measure."""
        return self.default_m.get(shape) or next(iter(self.default_m.values()))


def read_shape(shapes: dict[str, tuple[int, ...]], shape: str) -> tuple[int, ...]:
    """Return the numbers of a shape, given as a name or as numbers such as 896x4864."""
    return shapes[shape] if shape in shapes else tuple(map(int, shape.split("x")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    op: str
    shape: str
    m: int
    microseconds: float
    floor_microseconds: float | None
    gigabytes_per_second: float
    teraflops: float
    error: float  # relative, Frobenius
    baselines: dict[str, float]  # microseconds

    @property
    def percent_of_floor(self) -> float | None:
        floor = self.floor_microseconds
        return None if floor is None else 100 * floor / self.microseconds

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"percent_of_floor": self.percent_of_floor}


def copies_needed(num_bytes: int) -> int:
    """Return how many copies of an input of this size exceed every cache."""
    return max(1, min(MAX_CALLS, -(-int(COLD_BYTES) // max(1, num_bytes))))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check(case: Case) -> float:
    """Return the error of the first call. Raises KernelError if it is too large or NaN."""
    error = relative_error(case.values(case.calls[0]()), case.want)
    if not error <= case.allowed_error:
        raise KernelError(
            f"{case.op} {case.shape} m={case.m}",
            f"is wrong on this GPU: relative error {error:.1e}, allowed {case.allowed_error:.0e}",
            "report it; no time of a wrong result is shown",
        )
    return error


def measure(case: Case, ceiling: Ceiling | None) -> Result:
    """Check one case, then time it and its baselines."""
    error = check(case)
    microseconds = case.timer(case.calls)
    return Result(
        op=case.op,
        shape=case.shape,
        m=case.m,
        microseconds=microseconds,
        floor_microseconds=floor_microseconds(case, ceiling),
        gigabytes_per_second=case.num_bytes / microseconds / 1e3,
        teraflops=case.operations / microseconds / 1e6,
        error=error,
        baselines={name: case.timer(calls) for name, calls in case.baselines.items()},
    )


def floor_microseconds(case: Case, ceiling: Ceiling | None) -> float | None:
    """Return the floor; None: this GPU has no measured rates, or the case counts no work."""
    if ceiling is None or not case.num_bytes + case.operations:
        return None
    return 1e6 * max(
        case.num_bytes / ceiling.bytes_per_second,
        case.operations / (case.operation_rate * ceiling.operations_per_second),
    )


HEADER = (
    f"{'op':16} {'shape':12} {'m':>5} {'us':>8} {'GB/s':>6} {'TFLOP/s':>8} {'floor':>8} {'%':>4}"
)


def format_result(result: Result) -> str:
    """Format a result as one line. A ratio above 1 means that the baseline takes longer."""
    floor = "-" if result.floor_microseconds is None else f"{result.floor_microseconds:.1f}"
    percent = "-" if result.percent_of_floor is None else f"{result.percent_of_floor:.0f}"
    line = (
        f"{result.op:16} {result.shape:12} {result.m:5} {result.microseconds:8.1f}"
        f" {result.gigabytes_per_second:6.0f} {result.teraflops:8.1f} {floor:>8} {percent:>4}"
        f"  {result.error:.1e}"
    )
    for name, microseconds in result.baselines.items():
        line += f"  {name} {microseconds:.1f} ({microseconds / result.microseconds:.2f}x)"
    return line


def plot(results: Iterable[Result], path: str) -> None:
    """Plot microseconds over m, one panel per op and shape.

    Raises KernelError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter, NullLocator
    except ImportError:
        raise KernelError("--plot", "needs matplotlib", "pip install matplotlib") from None
    panels: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        panels.setdefault((result.op, result.shape), []).append(result)
    columns = min(4, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(4 * columns, 3 * rows), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    for axes, ((op, shape), points) in zip(all_axes, panels.items(), strict=False):
        names = dict.fromkeys(name for point in points for name in point.baselines)
        curves = {"ours": [(p.m, p.microseconds) for p in points]}
        curves["floor"] = [(p.m, p.floor_microseconds) for p in points if p.floor_microseconds]
        for name in names:
            curves[name] = [(p.m, p.baselines[name]) for p in points if name in p.baselines]
        for name, curve in curves.items():
            if curve:
                style = {"color": "gray", "linestyle": "--"} if name == "floor" else {"marker": "o"}
                axes.plot(*zip(*curve, strict=True), label=name, **style)
        axes.set(title=f"{op} {shape}", xlabel="m", ylabel="us", xscale="log", yscale="log")
        axes.set_xticks([p.m for p in points], [str(p.m) for p in points], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
