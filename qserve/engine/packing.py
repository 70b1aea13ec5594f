"""Values as bytes and back: what the leader tells the other ranks. No pickles, so no code.

A message is the length of its tree, the tree as JSON, and the arrays that the tree names, each at a
multiple of 8 bytes. Dataclasses travel by name, and only those of KNOWN: an end that gets bytes
from elsewhere makes nothing else of them.
"""

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from qserve.config import EngineConfig
from qserve.engine.draft_rows import DraftRows
from qserve.engine.host_pages import PageMoves
from qserve.engine.state_snapshots import StateMoves
from qserve.engine.step_input import HistoryFill, PoolRows, PromptRows, StepInput

KNOWN = {
    each.__name__: each
    for each in (
        StepInput,
        HistoryFill,
        PromptRows,
        PoolRows,
        DraftRows,
        PageMoves,
        StateMoves,
        EngineConfig,
    )
}
FIELDS = {each: tuple(field.name for field in fields(each)) for each in KNOWN.values()}
ALIGNMENT = 8
HEADER = 4


def pack(value: Any) -> bytes:
    """The bytes of numbers, texts, None, sequences, arrays, and the dataclasses of KNOWN."""
    arrays: list[np.ndarray] = []
    tree = json.dumps(_tree(value, arrays), separators=(",", ":")).encode()
    parts = [len(tree).to_bytes(HEADER, "little"), tree, bytes(-(HEADER + len(tree)) % ALIGNMENT)]
    for array in arrays:
        parts += (array.tobytes(), bytes(-array.nbytes % ALIGNMENT))
    return b"".join(parts)


def unpack(data: bytes) -> Any:
    """What `pack` was given; sequences become tuples."""
    buffer = bytearray(data)  # arrays that can be written to, as torch wants them
    length = int.from_bytes(buffer[:HEADER], "little")
    tree = json.loads(buffer[HEADER : HEADER + length])
    places = _places(buffer, HEADER + length)
    next(places)
    return _value(tree, places)


def _tree(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": value.dtype.str, "shape": value.shape}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, tuple | list):
        return [_tree(each, arrays) for each in value]
    names = FIELDS.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} is not in KNOWN of {__name__}")
    return {
        "class": type(value).__name__,
        "fields": [_tree(getattr(value, name), arrays) for name in names],
    }


def _places(buffer: bytearray, start: int) -> Iterator[np.ndarray]:
    """A generator that is sent (dtype, shape) and yields the next array."""
    array: np.ndarray | None = None
    while True:
        dtype, shape = yield array
        start += -start % ALIGNMENT
        count = int(np.prod(shape))
        array = np.frombuffer(buffer, dtype, count, start).reshape(shape)
        start += array.nbytes


def _value(tree: Any, places: Iterator[np.ndarray]) -> Any:
    if isinstance(tree, list):
        return tuple(_value(each, places) for each in tree)
    if not isinstance(tree, dict):
        return tree
    if "array" in tree:
        return places.send((np.dtype(tree["array"]), tree["shape"]))
    made = KNOWN[tree["class"]]
    values = [_value(each, places) for each in tree["fields"]]
    return made(**dict(zip(FIELDS[made], values, strict=True)))
