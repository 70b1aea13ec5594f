"""`qserve bench kernels --tune`: measure other tiles on this GPU and keep what is faster.

A search starts from the choice of the config, changes one field at a time and moves to what is
faster, until nothing is or the time is over. Every tile is tried through the table that the kernels
read, so what is timed is what will run; a wrong result is never timed. Compiling takes most of the
time: a tile that another shape has used costs milliseconds.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from qkernels.attention.config import AttentionTile, attention_tile
from qkernels.bench.measure import REPLAYS, Case, check, time_calls
from qkernels.errors import KernelError
from qkernels.gpu import device
from qkernels.operands.limbs import LINEAR_DIGITS_MAX_ROWS
from qkernels.tuning import table as tile_table
from qkernels.tuning import table as tuning_table
from qkernels.tuning.table import Tile, TileRow, TileTable
from qkernels.w8a8.config import (
    INT8_HOPPER_IDLE_ROWS,
    INT8_HOPPER_SPLITS,
    Int8HopperTile,
    Int8Tile,
    int8_hopper_starts,
    int8_hopper_tile,
    int8_tile,
)
from qkernels.wna16.configs import chosen_linear_tile
from qkernels.wna16.sm90_gemv_imma_config import LinearDigitsTile
from qkernels.wna16.sm90_large_m_config import LINEAR_HOPPER_SPLITS, LinearHopperTile
from qkernels.wna16.sm90_small_m_config import LINEAR_RING_ROWS, LinearRingTile
from qkernels.wna16.triton_config import LINEAR_MAX_ROWS, LinearTile, linear_tile

MIN_GAIN = 0.02  # repeated medians differ by less
QUICK_REPLAYS = 5

# Values that a search tries for one field at a time.
OPTIONS: dict[type, dict[str, tuple[object, ...]]] = {
    LinearTile: {
        "split": (1, 2, 3, 4, 6, 8, 10),
        "block_m": (16, 32, 64, 128),
        "block_n": (64, 128),
        "stages": (2, 3, 4, 5),
        "warps": (4, 8),
        "bulk": (False, True),
        "early": (False, True),
    },
    LinearHopperTile: {  # its blocks follow from the problem and the GPU
        "parts": (2, 3),
        "block_m": (64, 128, 256),
        "split": LINEAR_HOPPER_SPLITS,
        "halves": (False, True),
    },
    LinearDigitsTile: {
        "block_n": (16, 32, 64),
        "warps": (4, 8, 16),
        "ahead": (1, 2, 3, 4),
    },
    LinearRingTile: {
        "rows": LINEAR_RING_ROWS,
        "split": (1, 2, 3, 4, 5, 6, 7, 8, 10, 12),
        "stages": (2, 3, 4, 5, 6),
        "alone": (False, True),
        "early": (False, True),
    },
    Int8Tile: {
        "split": (1, 2, 3, 4),
        "block_m": (16, 32, 64, 128, 256),
        "block_n": (32, 64, 128, 256),
        "block_k": (64, 128, 256),
        "stages": (3, 4, 5, 6),
        "warps": (4, 8),
        "weight_left": (False, True),
        "early": (False, True),
    },
    Int8HopperTile: {
        "parts": (1, 2, 3),
        "block_right": (16, 32, 64, 128, 256),
        "part": (64, 128),
        "weight_left": (False, True),
        "idle_rows": INT8_HOPPER_IDLE_ROWS,
        "split": INT8_HOPPER_SPLITS,  # that meet, or whose last adds up
        "blocks_per_sm": (1, 2),
        "max_first_stages": (2, 4, 8, 24),
        "stores": (1, 2),
        "left_of_group": (8, 16),
    },
    AttentionTile: {
        "split": (1, 2, 4, 8, 16, 32),
        "keys": (32, 64, 128),
        "stages": (1, 2, 3, 4),
        "warps": (2, 4, 8),
        "block_q": (1, 2, 4, 8, 16, 32, 64, 128),  # block_m follows
    },
}


def _has_gluon() -> bool:
    return torch.cuda.is_available() and device.lacks_gluon(torch.device("cuda")) is None


def _linear_default(sm_count: int, **problem: int) -> Tile | None:
    tile = chosen_linear_tile(**problem, sm_count=sm_count, gluon=_has_gluon())
    # a table holds a tile for all rows of a bucket, each of which takes up to so many blocks
    if isinstance(tile, LinearHopperTile):
        return dataclasses.replace(tile, blocks=sm_count)
    return tile


def _int8_default(sm_count: int, M: int, N: int, K: int, integers: bool) -> Tile:
    if _has_gluon():
        return int8_hopper_tile(M, N, K, sm_count, "int" if integers else "float")
    return int8_tile(M, N, K, sm_count, integers)


# What the search starts from: the choice of the config.
DEFAULTS: dict[str, Callable[..., Tile | None]] = {
    "w4a16": _linear_default,
    "w8a8": _int8_default,
    "paged_attention": attention_tile,
}


class NotTaken(Exception):
    """No kernel looked for the tile: another one does this problem on this GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What a search of one case found. `best` is `default` where nothing was faster."""

    case: Case
    default: Tile | None
    best: Tile | None
    default_microseconds: float
    microseconds: float
    tried: int
    refused: int  # did not compile, or needs more of the GPU than it has
    wrong: tuple[Tile, ...]  # tiles that gave a wrong result: to be reported

    @property
    def is_faster(self) -> bool:
        return self.best != self.default

    def to_dict(self) -> dict[str, object]:
        return {
            "op": self.case.op,
            "shape": self.case.shape,
            "m": self.case.m,
            "tile": None if self.best is None else tile_table.tile_to_dict(self.best),
            "is_faster": self.is_faster,
            "microseconds": self.microseconds,
            "default_microseconds": self.default_microseconds,
            "wrong": [tile_table.tile_to_dict(tile) for tile in self.wrong if tile is not None],
        }


def neighbours(tile: Tile) -> Iterator[Tile]:
    """Every tile that differs in one field, and in those that must follow it."""
    for name, values in OPTIONS[type(tile)].items():
        old = getattr(tile, name)
        for value in values:
            if isinstance(tile, Int8HopperTile) and name == "split":
                for meet in (False, True):
                    if (value, meet) != (old, tile.meet):
                        yield dataclasses.replace(tile, split=value, meet=meet)
                continue
            if value == old:
                continue
            if isinstance(tile, AttentionTile) and name == "block_q":
                heads = tile.block_m // tile.block_q
                yield dataclasses.replace(tile, block_q=value, block_m=value * heads)
            else:
                yield dataclasses.replace(tile, **{name: value})


def runs_here(op: str, tile: Tile, problem: dict[str, object], sm_count: int) -> bool:
    """Whether all rows of the problem's bucket can take the tile on a GPU of so many SMs."""
    tuned = tile_table.OPS[op]
    if type(tile) not in tuned.tiles or tuned.fault(tile, problem) is not None:
        return False
    if isinstance(tile, Int8HopperTile):
        return tile.fits(tile_table.bucket(problem["M"]), problem["N"], sm_count)
    return True


def starts(op: str, problem: dict[str, object], sm_count: int) -> list[Tile | None]:
    """The default choice first, then what the config chooses for twice and half as many rows.

    Of W4A16 also a tile of each body that takes many rows, and the library's product where they
    are very many; of W8A8 on sm_90 a tile of each size: what is slower on the GPU of the config may
    be faster on this one.
    """
    choose = DEFAULTS[op]
    found = [choose(sm_count=sm_count, **problem)]
    if "M" in problem:
        M = problem["M"]
        for other in (min(2 * M, LINEAR_MAX_ROWS), max(1, M // 2)):
            found.append(choose(sm_count=sm_count, **problem | {"M": other}))
    if op == "w4a16":
        found.append(linear_tile(M, problem["N"], problem["K"], problem["group"], sm_count))
        if _has_gluon():
            found += [LinearRingTile(rows=rows) for rows in LINEAR_RING_ROWS if rows >= M][:1]
            if M > LINEAR_DIGITS_MAX_ROWS:
                block_m = 64 if M <= 64 else 128
                bits = problem["bits"]
                found.append(LinearHopperTile(blocks=sm_count, bits=bits, block_m=block_m))
        if M >= 256:
            found.append(None)
    if op == "w8a8" and _has_gluon():
        found += int8_hopper_starts(M, problem["integers"])

    def can_run(tile: Tile | None) -> bool:
        return tile is None or runs_here(op, tile, problem, sm_count)

    return list(dict.fromkeys(found[:1] + list(filter(can_run, found[1:]))))


def search(
    first: Iterable[Tile | None],
    is_allowed: Callable[[Tile], bool],
    time_of: Callable[[Tile | None], float],
    out_of_time: Callable[[], bool],
) -> dict[Tile | None, float]:
    """Times of all tiles that were tried; inf where one failed. The fastest of `first` leads on."""
    times: dict[Tile | None, float] = {}
    for tile in first:
        if tile not in times and (not times or not out_of_time()):
            times[tile] = time_of(tile)
    best = min(times, key=times.get)
    moved = best is not None
    while moved and not out_of_time():
        moved = False
        for tile in neighbours(best):
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
    case: Case, table: TileTable, sm_count: int, versions: str, out_of_time: Callable[[], bool]
) -> Tuned:
    """Search one case. `table` is the one that the kernels read; its row of this case is replaced
    by the fastest tile, or removed where the choice of the config is as fast.
    """
    op, problem = case.tuned
    first = starts(op, problem, sm_count)
    blank = TileRow(
        op=op,
        problem=problem,
        tile=None,
        microseconds=0.0,
        default_microseconds=None,
        versions=versions,
    )
    wrong: dict[Tile | None, None] = {}

    def time_of(tile: Tile | None, replays: int = QUICK_REPLAYS) -> float:
        with table.trying(dataclasses.replace(blank, tile=tile)):
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

    def is_allowed(tile: Tile) -> bool:
        return runs_here(op, tile, problem, sm_count)

    table.rows.pop(blank.key, None)
    times = search(first, is_allowed, time_of, out_of_time)
    best, default = min(times, key=times.get), first[0]
    best_time = default_time = times[default]
    if best != default:  # once more, side by side and longer
        default_time, best_time = (time_of(tile, REPLAYS) for tile in (default, best))
        if best_time < (1 - MIN_GAIN) * default_time:
            faster = dataclasses.replace(
                blank,
                tile=best,
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
        sm_count = device.sm_count(device)
        try:
            show(tune_case(case, table, sm_count, versions, lambda: time.monotonic() > end))
        except NotTaken:
            untuned.append(f"{case.op} {case.shape} m={case.m}")
            continue
        tile_table.write(table, path)
        done += 1
    if not done and untuned:
        raise KernelError(f"--tune {untuned[0]}", "is done by a kernel without tiles to choose")
    if not done:
        raise KernelError("--tune", "nothing was measured", "give it more --tune-seconds")
    return path


def own_table(device: torch.device) -> tuple[TileTable, Path]:
    """The table that the kernels read, and its file. A damaged file is set aside."""
    path = tile_table.default_path(torch.cuda.get_device_name(device))
    try:
        return tuning_table.tile_table_of(device), path
    except KernelError:
        path.replace(path.with_suffix(".damaged"))
        return tuning_table.tile_table_of(device), path


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
