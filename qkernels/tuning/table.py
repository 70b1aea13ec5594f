"""Tuning table of one GPU: measured configs in a JSON file, one line per problem.

`qserve bench kernels --tune` writes the file. A kernel's host function asks `find` before it uses
its default config. An operation's rows are read and checked when it first asks: a split that does
not fit the workspace would overwrite other memory.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from formats.files.atomic_file import write_atomic
from qkernels.errors import KernelError
from qkernels.tuning.op import Config, Key, TunedOp

FORMAT = 2
REMEDY = "delete it, or write it again with: qserve bench kernels --tune"

_num_changes = 0


def num_changes() -> int:
    """Return how often any table has changed. A plan from before the last change is out of date."""
    return _num_changes


def _count_change() -> None:
    global _num_changes
    _num_changes += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRow:
    """One measured config. `config` None: dequantize, then cuBLAS."""

    op: TunedOp
    problem: dict[str, object]
    config: Config | None
    microseconds: float
    default_microseconds: float | None  # time of the default in the same run; None: cannot run
    versions: str = ""  # software versions of the measurement

    @property
    def key(self) -> Key:
        return self.op.key(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """All rows of one GPU, by key."""

    gpu: str
    path: Path | None = None
    rows: dict[Key, TuningRow] = field(default_factory=dict)
    # rows of the file by operation, until the operation first asks
    unread: dict[str, list[dict]] = field(default_factory=dict)
    # keys of the rows that kernels used, from which a search knows that its config ran
    taken: set[Key] = field(default_factory=set, compare=False)

    @property
    def num_rows(self) -> int:
        """Number of rows, including those that no operation has asked for yet."""
        return len(self.rows) + sum(map(len, self.unread.values()))

    def find(self, op: TunedOp, **problem: object) -> TuningRow | None:
        """Return the row of this problem, or None. Takes little time if the table is empty.

        Raises KernelError if the file's rows of this operation are damaged.
        """
        if not self.rows and not self.unread:
            return None
        self.read_rows_(op)
        key = op.key(problem)
        row = self.rows.get(key)
        if row is not None:
            self.taken.add(key)
        return row

    def measured(self, op: TunedOp, **exact: object) -> list[TuningRow]:
        """Return the rows of problems with these exact fields, for any number of rows M."""
        self.read_rows_(op)
        return [
            row
            for row in self.rows.values()
            if row.op is op and all(row.problem[name] == value for name, value in exact.items())
        ]

    def add_(self, row: TuningRow) -> None:
        self.rows[row.key] = row
        _count_change()

    def remove_(self, key: Key) -> None:
        """Remove a row, if it exists."""
        self.rows.pop(key, None)
        _count_change()

    def read_rows_(self, op: TunedOp) -> None:
        """Check and take over the file's rows of one operation, once.

        Raises KernelError if damaged.
        """
        for stored in self.unread.get(op.name, ()):
            with _damage_named(self.path):
                self.add_(_row_from_json(op, stored))
        self.unread.pop(op.name, None)

    @contextlib.contextmanager
    def trying(self, row: TuningRow) -> Iterator[None]:
        """Use a row temporarily: afterwards the table is as it was before."""
        self.read_rows_(row.op)
        before = dict(self.rows)
        self.taken.discard(row.key)
        self.add_(row)
        try:
            yield
        finally:
            self.rows.clear()
            self.rows.update(before)
            _count_change()


def default_path(gpu: str) -> Path:
    """Return the path of a GPU's table; the file has the name of the GPU."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")
    # Path.home() would raise for a container's user without a home folder
    return Path(os.path.expanduser("~/.cache/qserve/tiles"), f"{name}.json")


def write(table: TuningTable, path: Path) -> None:
    """Write all rows, one per line, atomically: another process never reads half a file."""
    rows = [_row_to_json(row) for row in table.rows.values()]
    rows += [stored for rows_of_op in table.unread.values() for stored in rows_of_op]
    head = {"format": FORMAT, "gpu": table.gpu}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n'
    write_atomic(path, text)


def read(path: Path, gpu: str) -> TuningTable:
    """Return the table at `path`; an empty one if no file can be opened.

    Raises KernelError for a damaged file or the table of another GPU.
    """
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return TuningTable(gpu=gpu)
    except (OSError, UnicodeDecodeError) as error:
        raise KernelError(f"tuning table {path}", f"cannot be read: {error}", REMEDY) from None
    unread: dict[str, list[dict]] = {}
    with _damage_named(path):
        stored = json.loads(text)
        found = (stored["format"], stored["gpu"])
        if found != (FORMAT, gpu):
            raise ValueError(f"expected format {FORMAT} of {gpu!r}, found {found}")
        for each in stored["rows"]:
            unread.setdefault(str(each["op"]), []).append(each)
    return TuningTable(gpu=gpu, path=path, unread=unread)


@contextlib.contextmanager
def _damage_named(path: Path | None) -> Iterator[None]:
    """Turn the errors of reading a table into a KernelError that names the file."""
    try:
        yield
    except KeyError as error:
        raise KernelError(f"tuning table {path}", f"lacks {error}", REMEDY) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise KernelError(f"tuning table {path}", f"is damaged: {error}", REMEDY) from None


def _row_to_json(row: TuningRow) -> dict[str, object]:
    default = row.default_microseconds
    return {
        "op": row.op.name,
        "problem": row.problem,
        "config": None if row.config is None else config_to_dict(row.config),
        "microseconds": round(row.microseconds, 2),
        "default_microseconds": None if default is None else round(default, 2),
        "versions": row.versions,
    }


def config_to_dict(config: Config) -> dict[str, object]:
    """Return the config's fields and, as `kind`, its class."""
    return {"kind": type(config).__name__} | dataclasses.asdict(config)


def _row_from_json(op: TunedOp, stored: dict) -> TuningRow:
    """Return a checked row. Raises KeyError, ValueError or TypeError."""
    problem = stored["problem"]
    if set(problem) != {*op.exact, *op.bucketed}:
        raise ValueError(f"{op.name}: expected a problem of {(*op.exact, *op.bucketed)}")
    config = None
    if stored["config"] is not None:
        config = _config_from_dict(op, stored["config"])
        fault = op.fault(config, problem)
        if fault is not None:
            raise ValueError(f"{op.name} {problem}: {fault}")
    elif not op.can_be_none:
        raise ValueError(f"{op.name}: expected a config")
    return TuningRow(
        op=op,
        problem=problem,
        config=config,
        microseconds=float(stored["microseconds"]),
        default_microseconds=stored["default_microseconds"],
        versions=str(stored["versions"]),
    )


def _config_from_dict(op: TunedOp, stored: dict) -> Config:
    kinds = {cls.__name__: cls for cls in op.configs}
    kind, values = stored["kind"], {k: v for k, v in stored.items() if k != "kind"}
    if kind not in kinds:
        raise ValueError(f"expected a config of kind {' or '.join(kinds)}, found {kind!r}")
    for each in dataclasses.fields(kinds[kind]):
        if each.name in values and type(values[each.name]) is not each.type:
            raise ValueError(f"{kind}: expected {each.type.__name__} {each.name}")
    return kinds[kind](**values)


@functools.cache
def tuning_table_of(device: torch.device) -> TuningTable:
    """Return the table of this GPU, which may be empty. Raises KernelError for a damaged file."""
    if device.type != "cuda":
        return TuningTable(gpu=device.type)
    gpu = torch.cuda.get_device_name(device)
    return read(default_path(gpu), gpu)
