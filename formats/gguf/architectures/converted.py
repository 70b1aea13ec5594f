"""ConvertedTensor: a tensor that GGUF files store in another form than the family's checkpoints.

Most belong to layers with states, whose tensors llama.cpp reorders or transforms when it converts.

Needs no torch.

Legend: G key heads, R value heads of each, D rows of a value head; H heads, W rows of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Order(NamedTuple):
    """Order of rows, or of columns, of a file's tensor (row_moves.py)."""

    # tiled: after `kept` rows, files have [R, G, D] and the family has [G, R, D];
    # grouped: files have rows [G, D] for each width D in turn, the family has [G, all D];
    # paired: the first rows of each head rotate; in files they are pairs (2 i, 2 i + 1), not halves
    kind: Literal["tiled", "grouped", "paired"]
    # tiled: kept, G, R, D; grouped: G and each D; paired: H, rows that rotate, W
    numbers: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of rows."""
        if self.kind == "grouped":
            return self.numbers[0] * sum(self.numbers[1:])
        if self.kind == "paired":
            heads, _, width = self.numbers
            return heads * width
        kept, groups, each, width = self.numbers
        return kept + groups * each * width


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedTensor:
    """How a GGUF file stores one tensor of a layer, and its name in the family's checkpoints."""

    name: str  # the family's name, below the layer
    # column: [N] is [N, 1]; taps: [N, 1, K] is [N, K]; wide_taps: it is [1, N, 1, K];
    # groups: [N] is [groups, N / groups]; heads: [1, 1, N, 1] is [N, 1]
    shape: Literal["", "column", "taps", "wide_taps", "groups", "heads"] = ""
    exponent: bool = False  # files have -exp(x) for the family's numbers x
    # Orders of rows and of columns in files, by the names of `order_of`; "": the family's order
    rows: str = ""
    columns: str = ""
    # GGUF's name, below the layer, of a second tensor that has the last rows; "": there is none
    below: str = ""


def family_shape(form: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the family's shape of a stored tensor; None if the tensor does not have the form."""
    sizes = tuple(size for size in stored if size != 1)
    if form in ("column", "groups"):
        return (_product(stored),)
    if form == "heads":
        return (1, 1, _product(stored), 1)
    if form in ("taps", "wide_taps") and stored:
        taps = stored[-1]
        return (_product(stored) // taps, 1, taps) if len(sizes) <= 2 and taps else None
    return stored


def stored_shape(form: str, shape: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """Return the shape in files of a tensor with the family's shape: inverse of `family_shape`."""
    if form in ("column", "heads"):
        return (_product(shape), 1)
    if form == "groups":
        return (groups, shape[0] // groups)
    if form == "taps":
        return (shape[0], shape[-1])
    if form == "wide_taps":
        return (1, shape[0], 1, shape[-1])
    return shape


def order_of(name: str, config: Mapping[str, Any]) -> Order | None:
    """Return an order by its name: of the value heads of a delta net, or of pairs that rotate.

    None: files have the family's order.
    """
    if not name:
        return None
    if name in ("pairs_of_queries", "pairs_of_keys"):
        return _pairs(config, of_keys=name == "pairs_of_keys")
    groups, heads, keys, values = (
        config[key]
        for key in (
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("linear_key_head_dim", "linear_value_head_dim"),
        )
    )
    each = heads // groups
    if name == "by_key_head":
        return Order("grouped", (groups, keys, keys, each * values, each * values))
    if each == 1:
        return None
    kept = 2 * groups * keys if name == "values_after_keys" else 0
    return Order("tiled", (kept, groups, each, 1 if name == "heads" else values))


def _pairs(config: Mapping[str, Any], *, of_keys: bool) -> Order:
    """Return the order of queries, or of keys, of which a part of each head rotates."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    key = "partial_rotary_factor"
    part = rope.get(key, config.get(key, 1.0))
    count = (config.get("num_key_value_heads") or heads) if of_keys else heads
    return Order("paired", (count, int(width * part), width))


def rows_above(
    converted: ConvertedTensor, shape: tuple[int, ...], config: Mapping[str, Any]
) -> int:
    """Return the number of rows of the first of two tensors; `below` has the other rows."""
    if converted.rows != "by_key_head":
        return shape[0] // 2
    heads, values = config["linear_num_value_heads"], config["linear_value_head_dim"]
    return shape[0] - heads * values


def _product(sizes: tuple[int, ...]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found
