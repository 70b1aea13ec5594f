"""Rewrites patterns of JSON schemas with look-around as expressions that llguidance can read.

A pattern becomes a term with "and", "or" and "not", where a look-ahead is an intersection.
Brzozowski's derivatives turn the term into an automaton, and state elimination turns the automaton
into a plain expression. Each step has a limit. UnsupportedPattern is raised if a limit is exceeded,
or if the pattern is not a regular language (because of a back reference).
"""

import re
from functools import lru_cache
from re import _constants as op
from re import _parser as parser

from qserve.structured.pattern_algebra import (
    LAST,
    Algebra,
    Ranges,
    Term,
    UnsupportedPattern,
    merged,
)

MAX_PATTERN_CHARS = 1000
MAX_STATES = 150
MAX_RESULT_CHARS = 30_000
MAX_WHOLE_CHARS = 2000  # beyond this length, several short expressions are tried instead
LOOK = re.compile(r"\(\?<?[=!]|\\[bB]")
START_LOOK = re.compile(r"\^\(\?([=!])")
END_LOOK = re.compile(r"\(\?<([=!])((?:\\.|[^()\\])+)\)\$$")  # a look-behind at the end
JS_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])")


def has_look_around(pattern: str) -> bool:
    return bool(LOOK.search(pattern))


@lru_cache(maxsize=256)
def rewrite(patterns: tuple[str, ...], forbidden: tuple[str, ...] = ()) -> str:
    """Return one anchored expression for texts that match all `patterns` and none of `forbidden`.

    Patterns are in ECMAScript's syntax, and match anywhere in a text unless they are anchored.
    Raises UnsupportedPattern, also if no text matches.
    """
    algebra = Algebra()
    terms = [_searched(algebra, pattern) for pattern in patterns]
    terms += [algebra.negation(_searched(algebra, pattern)) for pattern in forbidden]
    automaton = _Automaton(algebra, algebra.both(terms))
    return f"^(?:{automaton.expression()})$"


@lru_cache(maxsize=256)
def is_within(narrow: str, wide: str) -> bool:
    """Return True if every text that `narrow` matches provably matches `wide`."""
    algebra = Algebra()
    try:
        outside = [_searched(algebra, narrow), algebra.negation(_searched(algebra, wide))]
        return _Automaton(algebra, algebra.both(outside)).is_empty
    except UnsupportedPattern:
        return False


def without_look_around(pattern: str) -> list[str]:
    """Return plain patterns; texts match `pattern` if they match all. Raises UnsupportedPattern."""
    if not has_look_around(pattern):
        return [pattern]
    try:
        whole = rewrite((pattern,))
        if len(whole) <= MAX_WHOLE_CHARS:
            return [whole]
    except UnsupportedPattern:
        pass  # rewriting parts of the pattern separately may still work
    found, rest = [], pattern
    if not _is_choice(pattern):
        while rest.startswith("^") and (look := START_LOOK.match(rest)):
            end = _closing(rest, look.end())
            inner = f"^(?:{rest[look.end() : end]})"
            found += without_look_around(inner) if look[1] == "=" else [rewrite((), (inner,))]
            rest = f"^{rest[end + 1 :]}"
        if end_look := END_LOOK.search(rest):
            inner = f"(?:{end_look[2]})$"
            found += [inner] if end_look[1] == "=" else [rewrite((), (inner,))]
            rest = f"{rest[: end_look.start()]}$"
    return [*found, rewrite((rest,)) if has_look_around(rest) else rest]


def _is_choice(pattern: str) -> bool:
    """Return True if a pattern has branches at the top, so that `^` belongs only to the first."""
    try:
        return any(code is op.BRANCH for code, _ in parser.parse(JS_GROUP.sub("(?P<", pattern)))
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(str(error)) from None


def _closing(pattern: str, start: int) -> int:
    """Return the end of the group whose content starts at `start`."""
    depth, index, is_class = 1, start, False
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        else:
            depth += (character == "(") - (character == ")")
            if not depth:
                return index
        index += 1
    raise UnsupportedPattern("a group without an end")


def literals(texts: list[str]) -> str:
    """Return a pattern that matches exactly these texts."""
    return f"^(?:{'|'.join(map(re.escape, texts))})$"


def _searched(algebra: "Algebra", pattern: str) -> Term:
    """Return the term of all texts that contain a match of a pattern."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise UnsupportedPattern(f"longer than {MAX_PATTERN_CHARS} characters")
    try:
        tree = parser.parse(JS_GROUP.sub("(?P<", pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedPattern(str(error)) from None
    if tree.state.flags & ~re.UNICODE:
        raise UnsupportedPattern("flags")
    items = list(tree)
    anywhere = algebra.after(algebra.some, algebra.language(items, algebra.all, is_start=False))
    return algebra.either([algebra.language(items, algebra.all, is_start=True), anywhere])


class _Automaton:
    """Deterministic automaton of a term. States are derivatives of the term."""

    def __init__(self, algebra: Algebra, start: Term) -> None:
        borders = algebra.borders()
        ends = [*(border - 1 for border in borders[1:]), LAST]
        states, edges = [start], []
        numbers = {start: 0}
        for state in states:
            reached: dict[int, list[tuple[int, int]]] = {}
            for low, high in zip(borders, ends, strict=True):
                target = algebra.derivative(state, low)
                if target is algebra.nothing:
                    continue
                if target not in numbers:
                    if len(states) >= MAX_STATES:
                        raise UnsupportedPattern("too many states")
                    numbers[target] = len(states)
                    states.append(target)
                reached.setdefault(numbers[target], []).append((low, high))
            edges.append({target: merged(ranges) for target, ranges in reached.items()})
        self._accepting = [algebra.has_empty(state) for state in states]
        self._edges = edges
        self._merge_equal_states()

    def _merge_equal_states(self) -> None:
        """Moore's algorithm: merge states that accept the same texts."""
        count = len(self._edges)
        groups, num_groups = [int(each) for each in self._accepting], 0
        while True:
            signatures: dict[tuple, int] = {}
            new = []
            for state in range(count):
                by_group: dict[int, list] = {}
                for target, ranges in self._edges[state].items():
                    by_group.setdefault(groups[target], []).extend(ranges)
                shape = frozenset((group, merged(r)) for group, r in by_group.items())
                new.append(signatures.setdefault((groups[state], shape), len(signatures)))
            if len(signatures) == num_groups:
                break
            groups, num_groups = new, len(signatures)
        edges: list[dict[int, Ranges]] = [{} for _ in range(num_groups)]
        for state in range(count):
            into = edges[groups[state]]
            for target, ranges in self._edges[state].items():
                known = into.get(groups[target], ())
                into[groups[target]] = merged([*known, *ranges])
        accepting = [False] * num_groups
        for state, group in enumerate(groups):
            accepting[group] = accepting[group] or self._accepting[state]
        self._edges, self._accepting, self._start = edges, accepting, groups[0]

    @property
    def is_empty(self) -> bool:
        """True if no text is accepted."""
        return not any(self._accepting)

    def expression(self) -> str:
        """Return an expression, by eliminating the states one by one, the least connected first."""
        start, end = -1, -2
        out: dict[int, dict[int, str]] = {start: {self._start: ""}, end: {}}
        for state, edges in enumerate(self._edges):
            out[state] = {target: _class_text(ranges) for target, ranges in edges.items()}
            if self._accepting[state]:
                out[state][end] = ""
        left = set(range(len(self._edges)))
        while left:
            state = min(left, key=lambda each: self._cost(out, each))
            left.remove(state)
            self._remove(out, state)
        if end not in out[start]:
            raise UnsupportedPattern("nothing matches it")
        return out[start][end]

    @staticmethod
    def _cost(out: dict[int, dict[int, str]], state: int) -> int:
        into = sum(state in edges for edges in out.values())
        return into * len(out[state]) * (1 + sum(map(len, out[state].values())))

    @staticmethod
    def _remove(out: dict[int, dict[int, str]], state: int) -> None:
        edges = out.pop(state)
        loop = edges.pop(state, None)
        around = "" if not loop else f"(?:{loop})*"
        size = 0
        for others in out.values():
            first = others.pop(state, None)
            if first is None:
                continue
            for target, then in edges.items():
                text = f"{_group(first)}{around}{_group(then)}"
                others[target] = f"{others[target]}|{text}" if target in others else text
                size += len(others[target])
        if size > MAX_RESULT_CHARS:
            raise UnsupportedPattern("too long when rewritten")


def _group(text: str) -> str:
    return f"(?:{text})" if "|" in text else text


def _class_text(ranges: Ranges) -> str:
    if ranges == ((0, LAST),):
        return r"[\x{0}-\x{10FFFF}]"
    parts = [
        rf"\x{{{low:X}}}" if low == high else rf"\x{{{low:X}}}-\x{{{high:X}}}"
        for low, high in ranges
    ]
    return f"[{''.join(parts)}]"
