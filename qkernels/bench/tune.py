"""`qserve bench kernels --tune`: measure other configs on this GPU and keep faster ones.

A search starts from the default config, changes one field at a time, and moves to a faster config
until there is none or the time is over. Every config is tried through the table that the kernels
read, so the measured config is the one that will run. A wrong result is never timed. Compiling
takes most of the time: a config that another shape has already used costs milliseconds.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from qkernels.attention.tuned import TUNED as ATTENTION
from qkernels.bench.measure import REPLAYS, Case, check, time_calls
from qkernels.errors import KernelError
from qkernels.gpu import device as gpu_device
from qkernels.moe.tuned import TUNED as MOE
from qkernels.tuning import table as tuning_table
from qkernels.tuning.op import Config, TunedOp
from qkernels.tuning.table import TuningRow, TuningTable
from qkernels.w4a8.tuned import TUNED as W4A8
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16.tuned import TUNED as WNA16

MIN_GAIN = 0.02  # least relative gain; repeated medians differ by less
QUICK_REPLAYS = 5
TUNED_OPS = (ATTENTION, MOE, W4A8, W8A8, WNA16)  # all tunable operations


class NotTaken(Exception):
    """No kernel read the config, because another kernel runs this problem on this GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of the search of one case. If nothing was faster, `best` is `default`."""

    case: Case
    default: Config | None
    best: Config | None
    default_microseconds: float
    microseconds: float
    tried: int
    refused: int  # configs that did not compile or exceed the GPU's resources
    wrong: tuple[Config, ...]  # configs with a wrong result, which a user should report

    @property
    def is_faster(self) -> bool:
        return self.best != self.default

    def to_dict(self) -> dict[str, object]:
        return {
            "op": self.case.op,
            "shape": self.case.shape,
            "m": self.case.m,
            "tile": None if self.best is None else tuning_table.config_to_dict(self.best),
            "is_faster": self.is_faster,
            "microseconds": self.microseconds,
            "default_microseconds": self.default_microseconds,
            "wrong": [tuning_table.config_to_dict(tile) for tile in self.wrong if tile is not None],
        }


def starts(op: TunedOp, problem: dict[str, object], sm_count: int) -> list[Config | None]:
    """Return the default, then the operation's other start configs that this GPU can run."""
    found = op.starts(sm_count=sm_count, **problem)

    def can_run(config: Config | None) -> bool:
        return config is None or op.runs_here(config, problem, sm_count)

    default = op.default(sm_count=sm_count, **problem)
    return list(dict.fromkeys([default, *filter(can_run, found)]))


def search(
    op: TunedOp,
    first: Iterable[Config | None],
    is_allowed: Callable[[Config], bool],
    time_of: Callable[[Config | None], float],
    out_of_time: Callable[[], bool],
) -> dict[Config | None, float]:
    """Return the times of all tried configs; inf for failures.

    The search continues from the fastest config of `first`.
    """
    times: dict[Config | None, float] = {}
    for tile in first:
        if tile not in times and (not times or not out_of_time()):
            times[tile] = time_of(tile)
    best = min(times, key=times.get)
    moved = best is not None
    while moved and not out_of_time():
        moved = False
        for tile in op.neighbours(best):
            if tile in times or not is_allowed(tile):
                continue
            if out_of_time():
                break
            times[tile] = time_of(tile)
            if times[tile] < times[best]:
                best, moved = tile, True
                break
    return times


def tune_case(
    case: Case, table: TuningTable, sm_count: int, versions: str, out_of_time: Callable[[], bool]
) -> Tuned:
    """Search one case.

    `table` is the table that the kernels read. Its row of this case is replaced by the fastest
    config, or removed if the default is as fast.
    """
    op, problem = case.tuned
    first = starts(op, problem, sm_count)
    blank = TuningRow(
        op=op,
        problem=problem,
        config=None,
        microseconds=0.0,
        default_microseconds=None,
        versions=versions,
    )
    wrong: dict[Config | None, None] = {}

    def time_of(tile: Config | None, replays: int = QUICK_REPLAYS) -> float:
        with table.trying(dataclasses.replace(blank, config=tile)):
            try:
                check(case)
                if blank.key not in table.taken:
                    raise NotTaken
                return time_calls(case.calls, replays)
            except KernelError:
                wrong[tile] = None
            except _compile_errors() as error:
                if "CUDA error" in str(error):  # the GPU's context is lost
                    raise
        return math.inf

    def is_allowed(tile: Config) -> bool:
        return op.runs_here(tile, problem, sm_count)

    table.remove_(blank.key)
    times = search(op, first, is_allowed, time_of, out_of_time)
    best, default = min(times, key=times.get), first[0]
    best_time = default_time = times[default]
    if best != default:  # compare both again, with more replays
        default_time, best_time = (time_of(tile, REPLAYS) for tile in (default, best))
        if best_time < (1 - MIN_GAIN) * default_time:
            faster = dataclasses.replace(
                blank,
                config=best,
                microseconds=best_time,
                default_microseconds=None if math.isinf(default_time) else default_time,
            )
            table.add_(faster)
        else:
            best, best_time = default, default_time
    return Tuned(
        case=case,
        default=default,
        best=best,
        default_microseconds=default_time,
        microseconds=best_time,
        tried=len(times),
        refused=sum(math.isinf(each) for each in times.values()) - len(wrong),
        wrong=tuple(wrong),
    )


def _compile_errors() -> tuple[type[Exception], ...]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    return (OutOfResources, CompilationError, RuntimeError)


def tune(
    cases: Iterable[Case], seconds: float, versions: str, show: Callable[[Tuned], None]
) -> Path:
    """Search each case, and write the table after each one, so that a killed run keeps its results.

    Cases that a kernel without tunable configs runs on this GPU are skipped. Returns the path of
    the table. Raises KernelError if no case is tunable, or the time was too short for one.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    table, path = own_table(device)
    end = time.monotonic() + seconds
    done, untuned = 0, []
    for case in cases:
        if time.monotonic() > end:
            break
        if case.tuned is None:
            untuned.append(f"{case.op} {case.shape} m={case.m}")
            continue
        sm_count = gpu_device.sm_count(device)
        try:
            show(tune_case(case, table, sm_count, versions, lambda: time.monotonic() > end))
        except NotTaken:
            untuned.append(f"{case.op} {case.shape} m={case.m}")
            continue
        tuning_table.write(table, path)
        done += 1
    if not done and untuned:
        problem = "runs a kernel that has nothing to tune"
        raise KernelError(f"--tune {untuned[0]}", problem, "choose another --op, --shape or --m")
    if not done:
        raise KernelError("--tune", "nothing was measured", "raise --tune-seconds")
    return path


def own_table(device: torch.device) -> tuple[TuningTable, Path]:
    """Return the table that the kernels read, and its path. A damaged file is renamed."""
    path = tuning_table.default_path(torch.cuda.get_device_name(device))
    try:
        table = tuning_table.tuning_table_of(device)
        for op in TUNED_OPS:
            table.read_rows_(op)
    except KernelError:
        path.replace(path.with_suffix(".damaged"))
        tuning_table.tuning_table_of.cache_clear()
        table = tuning_table.tuning_table_of(device)
    return table, path


def format_tuned(tuned: Tuned) -> str:
    """Format a result as one line: the chosen config, and the change from the default."""
    case = tuned.case
    counts = f"{tuned.tried} tiles tried, {tuned.refused} refused"
    line = f"{case.op:16} {case.shape:12} {case.m:5} {tuned.default_microseconds:8.1f}"
    if tuned.is_faster:
        change = tuned.default_microseconds / tuned.microseconds
        line += f" -> {tuned.microseconds:8.1f} ({change:.2f}x)  {_difference(tuned)}  [{counts}]"
    else:
        line += f"  default kept  [{counts}]"
    for tile in tuned.wrong:
        line += f"\n  WRONG RESULT, please report: {tile}"
    return line


def _difference(tuned: Tuned) -> str:
    """Return the fields that differ from the default."""
    if tuned.best is None:
        return "dequantize, then the library's product"
    if type(tuned.default) is not type(tuned.best):
        return str(tuned.best)
    old = dataclasses.asdict(tuned.default)
    changed = {k: v for k, v in dataclasses.asdict(tuned.best).items() if old[k] != v}
    return ", ".join(f"{name} {value}" for name, value in changed.items())
