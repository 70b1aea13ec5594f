"""`qserve bench kernels --tune`: measure other tiles on this GPU and keep what is faster.

A search starts from the choice of the config, changes one field at a time and moves to what is
faster, until nothing is or the time is over. Every tile is tried through the table that the kernels
read, so what is timed is what will run; a wrong result is never timed. Compiling takes most of the
time: a tile that another shape has used costs milliseconds.
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

MIN_GAIN = 0.02  # repeated medians differ by less
QUICK_REPLAYS = 5
TUNED_OPS = (ATTENTION, MOE, W4A8, W8A8, WNA16)  # whose rows a table may hold


class NotTaken(Exception):
    """No kernel looked for the tile: another one does this problem on this GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of the search of one case. `best` is `default` where nothing was faster."""

    case: Case
    default: Config | None
    best: Config | None
    default_microseconds: float
    microseconds: float
    tried: int
    refused: int  # did not compile, or needs more of the GPU than it has
    wrong: tuple[Config, ...]  # tiles that gave a wrong result: to be reported

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
    """The default first, then what else the operation's search begins with and this GPU can run."""
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
    """Times of all tiles that were tried; inf where one failed. The fastest of `first` leads on."""
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
    """Search one case. `table` is the one that the kernels read; its row of this case is replaced
    by the fastest tile, or removed where the choice of the config is as fast.
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
    if best != default:  # once more, side by side and longer
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
    """Search each case and write the table after each: a killed run keeps what it found.

    A case that a kernel without tiles does on this GPU is left out. Returns where the table is.
    Raises KernelError where no case has tiles, or the time was too short for one.
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
        raise KernelError(f"--tune {untuned[0]}", "is done by a kernel without tiles to choose")
    if not done:
        raise KernelError("--tune", "nothing was measured", "give it more --tune-seconds")
    return path


def own_table(device: torch.device) -> tuple[TuningTable, Path]:
    """The table that the kernels read, and its file. A damaged file is set aside."""
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
    """One line: what was chosen, and the change from the default."""
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
    """The fields that differ from the default."""
    if tuned.best is None:
        return "dequantize, then the library's product"
    if type(tuned.default) is not type(tuned.best):
        return str(tuned.best)
    old = dataclasses.asdict(tuned.default)
    changed = {k: v for k, v in dataclasses.asdict(tuned.best).items() if old[k] != v}
    return ", ".join(f"{name} {value}" for name, value in changed.items())
