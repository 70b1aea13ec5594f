"""Safe reader of pickles: returns plain records, and never imports or calls what a pickle names.

It knows the opcodes that Python's pickler writes in protocols 2 to 5. Loads no torch.
"""

from dataclasses import dataclass, field
from pickletools import genops  # lists opcodes without running them
from typing import Any

PLAIN = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "SHORT_BINBYTES", "BINBYTES"),
    *("BINBYTES8", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
IGNORED = {"PROTO", "FRAME"}


class PickleError(ValueError):
    """The bytes are not a pickle that this reader knows."""


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that the pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module:.80}.{self.name:.80}"


@dataclass(slots=True)
class Made:
    """A call that unpickling would make, and the state that it would set on the result."""

    by: Name
    arguments: tuple[Any, ...]
    state: dict[str, Any] = field(default_factory=dict)


class _Mark:
    """Stack marker: the items of a list, tuple or dict follow."""


def read_pickle(data: bytes) -> Any:
    """Return the pickled value, of built-in types, Name and Made. Raises PickleError."""
    try:
        return _Machine().run(data)
    except PickleError:
        raise
    except Exception as error:  # wrong bytes can fail at any opcode
        raise PickleError(f"{type(error).__name__}: {error!s:.200}") from None


class _Machine:
    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in genops(data):
            if opcode.name == "STOP":
                (result,) = self._stack
                return result
            self._step(opcode.name, argument)
        raise PickleError("it has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in IGNORED:
            return
        if name in PLAIN:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in TUPLES:
            stack.append(tuple(self._pop(TUPLES[name])))
        elif name == "MARK":
            stack.append(_Mark)
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            stack.append([] if name == "EMPTY_LIST" else {})
        elif name in ("APPEND", "APPENDS"):
            items = self._pop(1) if name == "APPEND" else self._marked()
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._marked()
            _of(dict, stack[-1]).update(zip(items[::2], items[1::2], strict=True))
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        else:
            self._make(name, argument)

    def _make(self, name: str, argument: Any) -> None:
        """Run an opcode that names, creates or changes an object."""
        stack = self._stack
        if name == "GLOBAL":
            stack.append(Name(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            module, attribute = self._pop(2)
            stack.append(Name(_of(str, module), _of(str, attribute)))
        elif name in ("REDUCE", "NEWOBJ"):
            by, arguments = self._pop(2)
            stack.append(Made(_of(Name, by), _of(tuple, arguments)))
        elif name == "BUILD":
            (state,) = self._pop(1)
            _of(Made, stack[-1]).state = _of(dict, state)
        else:
            raise PickleError(f"the opcode {name} is not accepted")

    def _pop(self, count: int) -> list[Any]:
        found = self._stack[len(self._stack) - count :]
        if len(found) < count or _Mark in found:
            raise PickleError("an opcode lacks its values")
        del self._stack[len(self._stack) - count :]
        return found

    def _marked(self) -> list[Any]:
        place = len(self._stack) - 1 - self._stack[::-1].index(_Mark)
        found = self._stack[place + 1 :]
        del self._stack[place:]
        return found


def _of(kind: type, value: Any) -> Any:
    if not isinstance(value, kind):
        raise PickleError(f"expected {kind.__name__}, found {type(value).__name__}")
    return value
