"""Expert placement: which rank holds which experts of each layer (expert parallelism).

The numbers of experts per rank differ by at most one, so that all ranks need about the same memory.
E: experts of a layer.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.errors import InputError

LINEAR, ROUND_ROBIN = "linear", "round_robin"
FLAG = "--expert-placement-strategy"
COUNTS = "logical_count"  # key of the table in a file of loads; SGLang uses the same name
MAX_BYTES = 64 * 2**20  # maximum size of a file of loads

RankExperts = tuple[tuple[int, ...], ...]  # experts of each rank, in ascending order


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlacement:
    """The experts of each rank, for each layer."""

    same: RankExperts  # for layers without measured loads
    measured: tuple[RankExperts | None, ...] = ()  # by layer; None: the layer has no loads
    # Load of the busiest rank divided by the mean load, averaged over measured layers: for the
    # placement `linear`, and for this placement
    imbalances: tuple[float, float] | None = None

    def of_layer(self, layer: int) -> RankExperts:
        """Return the experts of each rank in a layer."""
        found = self.measured[layer] if layer < len(self.measured) else None
        return found or self.same

    @classmethod
    def make(cls, strategy: str, num_experts: int, num_ranks: int) -> "ExpertPlacement":
        """Place the experts by a strategy, or by a file of loads. Raises InputError."""
        if strategy == ROUND_ROBIN:
            return cls(same=round_robin(num_experts, num_ranks))
        same = linear(num_experts, num_ranks)
        if strategy == LINEAR:
            return cls(same=same)
        loads = read_loads(strategy, num_experts)
        measured = tuple(balanced(row, num_ranks) if any(row) else None for row in loads)
        pairs = [
            (imbalance(row, same), imbalance(row, placed))
            for row, placed in zip(loads, measured, strict=True)
            if placed is not None
        ]
        if not pairs:
            return cls(same=same)
        before, after = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
        return cls(same=same, measured=measured, imbalances=(before, after))

    def to_text(self) -> str:
        """Describe the placement in one line, for the log."""
        text = f"{' + '.join(str(len(experts)) for experts in self.same)} experts of a layer"
        if self.imbalances is None:
            return f"Ranks hold {text}"
        before, after = self.imbalances
        return (
            f"Ranks hold {text}, placed by loads: the busiest rank has {after:.2f} times the mean"
            f" load, in runs {before:.2f}"
        )


def linear(num_experts: int, num_ranks: int) -> RankExperts:
    """Place experts in contiguous runs. The first ranks get one more if there is a remainder."""
    sizes = _sizes(num_experts, num_ranks)
    ends = [sum(sizes[: rank + 1]) for rank in range(num_ranks)]
    return tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True))


def round_robin(num_experts: int, num_ranks: int) -> RankExperts:
    """Place expert e on rank e modulo the number of ranks."""
    return tuple(tuple(range(rank, num_experts, num_ranks)) for rank in range(num_ranks))


def balanced(loads_E: Sequence[int], num_ranks: int) -> RankExperts:
    """Place experts so that ranks have about equal loads.

    Experts are placed in order of falling load, each on the least loaded rank that has room.
    """
    room = _sizes(len(loads_E), num_ranks)
    experts: list[list[int]] = [[] for _ in range(num_ranks)]
    total = [0] * num_ranks
    for expert in sorted(range(len(loads_E)), key=lambda e: (-loads_E[e], e)):
        open_ranks = [rank for rank in range(num_ranks) if len(experts[rank]) < room[rank]]
        rank = min(open_ranks, key=lambda r: (total[r], len(experts[r]), r))
        experts[rank].append(expert)
        total[rank] += loads_E[expert]
    return tuple(tuple(sorted(each)) for each in experts)


def imbalance(loads_E: Sequence[int], placement: RankExperts) -> float:
    """Return the load of the busiest rank divided by the mean load."""
    loads = [sum(loads_E[expert] for expert in experts) for experts in placement]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _sizes(num_experts: int, num_ranks: int) -> list[int]:
    each, rest = divmod(num_experts, num_ranks)
    return [each + (rank < rest) for rank in range(num_ranks)]


def read_loads(file: str | Path, num_experts: int) -> list[list[int]]:
    """Read the file of `write_loads`: tokens per layer and expert. Raises InputError."""
    subject, path = f"{FLAG} {file}", Path(file)
    remedy = (
        f"give {LINEAR}, {ROUND_ROBIN}, or a file that --record-expert-loads wrote for this model"
    )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(subject, f"is larger than {MAX_BYTES} bytes", remedy)
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(subject, f"cannot be read: {error.strerror}", remedy) from None
    except ValueError:
        raise InputError(subject, "is not JSON", remedy) from None
    rows = found.get(COUNTS) if isinstance(found, dict) else None
    is_table = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
    if not is_table or not rows:
        raise InputError(subject, f'expected a list of rows at "{COUNTS}"', remedy)
    for number, row in enumerate(rows):
        if len(row) != num_experts or not all(type(n) is int and n >= 0 for n in row):
            raise InputError(
                f"{subject} layer {number}",
                f"expected {num_experts} counts of tokens, found {str(row):.60}",
                remedy,
            )
    return rows


def write_loads(file: str | Path, rows: Sequence[Sequence[int]], model: str) -> None:
    """Write a table of tokens per layer and expert. Layers without experts have zeros."""
    text = json.dumps({"model": model, COUNTS: [list(row) for row in rows]})
    Path(file).write_text(text + "\n", encoding="utf-8")
