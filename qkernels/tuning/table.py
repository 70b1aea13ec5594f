"""Tiles measured on one GPU: a JSON file, one line for each problem. Plain Python, like the config.

`qserve bench kernels --tune` writes the file; a kernel's host function asks `find` before it asks
the config. A row is found by what the product is (exact) and by how many rows it has (in buckets);
where there is none, the choice of the config holds.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from qkernels.attention import config as attention_config
from qkernels.attention.config import AttentionTile
from qkernels.errors import KernelError
from qkernels.gpu.config import power_of_two
from qkernels.w8a8 import config as w8a8_config
from qkernels.w8a8.config import Int8HopperTile, Int8Tile
from qkernels.wna16 import (
    sm90_gemv_imma_config,
    sm90_large_m_config,
    sm90_small_m_config,
    triton_config,
)
from qkernels.wna16.configs import AnyLinearTile
from qkernels.wna16.sm90_gemv_imma_config import LinearDigitsTile
from qkernels.wna16.sm90_large_m_config import LinearHopperTile
from qkernels.wna16.sm90_small_m_config import LinearRingTile
from qkernels.wna16.triton_config import LinearTile

FORMAT = 1
REMEDY = "delete it, or write it again with: qserve bench kernels --tune"
Tile = AnyLinearTile | Int8Tile | Int8HopperTile | AttentionTile
Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedOp:
    """What a row of one operation holds.

    `tiles`: the classes of its kernels' tiles, each with what says why one cannot do a problem.
    """

    tiles: dict[type, Callable[..., str | None]]
    exact: tuple[str, ...]
    bucketed: tuple[str, ...]
    can_be_none: bool = False  # the library's product is a choice too

    def key(self, problem: dict[str, object]) -> Key:
        """Raises KeyError where the problem lacks a field."""
        return (
            *(problem[name] for name in self.exact),
            *(bucket(problem[name]) for name in self.bucketed),
        )

    def fault(self, tile: Tile, problem: dict[str, object]) -> str | None:
        """Why the tile cannot do the problem or a larger one that shares its row; None: it can."""
        widest = problem | {name: bucket(problem[name]) for name in self.bucketed}
        return self.tiles[type(tile)](tile, **widest)


OPS: dict[str, TunedOp] = {
    "w4a16": TunedOp(
        tiles={
            LinearTile: triton_config.linear_tile_fault,
            LinearDigitsTile: sm90_gemv_imma_config.linear_digits_tile_fault,
            LinearHopperTile: sm90_large_m_config.linear_hopper_tile_fault,
            LinearRingTile: sm90_small_m_config.linear_ring_tile_fault,
        },
        exact=("N", "K", "group", "bits"),
        bucketed=("M",),
        can_be_none=True,
    ),
    "w8a8": TunedOp(
        tiles={
            Int8Tile: w8a8_config.int8_tile_fault,
            Int8HopperTile: w8a8_config.int8_hopper_tile_fault,
        },
        exact=("N", "K", "integers"),
        bucketed=("M",),
    ),
    "paged_attention": TunedOp(
        tiles={AttentionTile: attention_config.attention_tile_fault},
        exact=("num_kv_heads", "heads_per_kv_head", "head_dim", "element_size", "window"),
        bucketed=("num_requests", "max_query_len", "max_context_len"),
    ),
}


def bucket(count: int) -> int:
    """The largest count that shares a row with this one: powers of two."""
    return power_of_two(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRow:
    """One measured choice. `tile` None: the library's product, as in the config."""

    op: str
    problem: dict[str, object]
    tile: Tile | None
    microseconds: float
    default_microseconds: float | None  # the choice of the config, same run; None: it does not run
    versions: str = ""  # what it was measured with

    @property
    def key(self) -> Key:
        return (self.op, *OPS[self.op].key(self.problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """The rows of one GPU, by key."""

    gpu: str
    rows: dict[Key, TileRow] = field(default_factory=dict)
    # keys of the rows that kernels took: so a search knows that its tile ran
    taken: set[Key] = field(default_factory=set, compare=False)

    def find(self, op: str, **problem: object) -> TileRow | None:
        """The row of this problem. Cheap where the table is empty, as it is on most machines."""
        if not self.rows:
            return None
        key = (op, *OPS[op].key(problem))
        row = self.rows.get(key)
        if row is not None:
            self.taken.add(key)
        return row

    def measured(self, op: str, **exact: object) -> list[TileRow]:
        """The rows of products like this, whatever their number of rows."""
        return [
            row
            for row in self.rows.values()
            if row.op == op and all(row.problem[name] == value for name, value in exact.items())
        ]

    def add_(self, row: TileRow) -> None:
        self.rows[row.key] = row

    @contextlib.contextmanager
    def trying(self, row: TileRow) -> Iterator[None]:
        """The table with this row in it, and afterwards as it was."""
        before = dict(self.rows)
        self.taken.discard(row.key)
        self.add_(row)
        try:
            yield
        finally:
            self.rows.clear()
            self.rows.update(before)


def default_path(gpu: str) -> Path:
    """Where the table of a GPU is written and looked for: its name stands in the file's."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")
    # not Path.home(): that raises where a container's user has none
    return Path(os.path.expanduser("~/.cache/qserve/tiles"), f"{name}.json")


def write(table: TileTable, path: Path) -> None:
    """Write all rows, a line each. Another process never sees half a file."""
    rows = [_row_to_json(row) for row in table.rows.values()]
    head = {"format": FORMAT, "gpu": table.gpu}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_suffix(".tmp")
    staging.write_text(text)
    staging.replace(path)


def read(path: Path, gpu: str) -> TileTable:
    """The table at `path`; empty where no file can be reached. Raises KernelError for a bad one."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return TileTable(gpu=gpu)
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"tile table {path}", f"cannot be read: {error}", REMEDY) from None
    try:
        stored = json.loads(text)
        found = (stored["format"], stored["gpu"])
        if found != (FORMAT, gpu):
            raise ValueError(f"expected format {FORMAT} of {gpu!r}, found {found}")
        table = TileTable(gpu=gpu)
        for each in stored["rows"]:
            table.add_(_row_from_json(each))
    except KeyError as error:
        raise KernelError(f"tile table {path}", f"lacks {error}", REMEDY) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise KernelError(f"tile table {path}", f"is damaged: {error}", REMEDY) from None
    return table


def _row_to_json(row: TileRow) -> dict[str, object]:
    default = row.default_microseconds
    return {
        "op": row.op,
        "problem": row.problem,
        "tile": None if row.tile is None else tile_to_dict(row.tile),
        "microseconds": round(row.microseconds, 2),
        "default_microseconds": None if default is None else round(default, 2),
        "versions": row.versions,
    }


def tile_to_dict(tile: Tile) -> dict[str, object]:
    """Its fields, and which kernel's tile it is."""
    return {"kind": type(tile).__name__} | dataclasses.asdict(tile)


def _row_from_json(stored: dict) -> TileRow:
    """Raises KeyError, ValueError or TypeError."""
    op, problem = stored["op"], stored["problem"]
    if op not in OPS:
        raise ValueError(f"unknown operation {op!r}")
    tuned = OPS[op]
    if set(problem) != {*tuned.exact, *tuned.bucketed}:
        raise ValueError(f"{op}: expected a problem of {(*tuned.exact, *tuned.bucketed)}")
    tile = None
    if stored["tile"] is not None:
        tile = _tile_from_dict(tuned, stored["tile"])
        fault = tuned.fault(tile, problem)
        if fault is not None:
            raise ValueError(f"{op} {problem}: {fault}")
    elif not tuned.can_be_none:
        raise ValueError(f"{op}: expected a tile")
    return TileRow(
        op=op,
        problem=problem,
        tile=tile,
        microseconds=float(stored["microseconds"]),
        default_microseconds=stored["default_microseconds"],
        versions=str(stored["versions"]),
    )


def _tile_from_dict(tuned: TunedOp, stored: dict) -> Tile:
    kinds = {cls.__name__: cls for cls in tuned.tiles}
    kind, values = stored["kind"], {k: v for k, v in stored.items() if k != "kind"}
    if kind not in kinds:
        raise ValueError(f"expected a tile of kind {' or '.join(kinds)}, found {kind!r}")
    for each in dataclasses.fields(kinds[kind]):
        if each.name in values and type(values[each.name]) is not each.type:
            raise ValueError(f"{kind}: expected {each.type.__name__} {each.name}")
    return kinds[kind](**values)


@functools.cache
def tile_table_of(device: torch.device) -> TileTable:
    """The tiles that were measured on this GPU, or none. Raises KernelError for a damaged file."""
    if device.type != "cuda":
        return TileTable(gpu=device.type)
    gpu = torch.cuda.get_device_name(device)
    return read(default_path(gpu), gpu)
