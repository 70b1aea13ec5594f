"""Algebra of regular languages: character sets, concatenation, union, intersection, complement.

`Algebra.language` converts a regular expression that Python has parsed to a term.
`Algebra.derivative` returns a term's derivative by a character (Brzozowski).
"""

from re import _constants as op
from typing import Any

MAX_NODES = 20_000  # maximum number of terms for one pattern
MAX_WORK = 20_000  # maximum number of derivatives and joined terms for one pattern: about 10 ms
MAX_REPEAT = 300
LAST = 0x10FFFF
HAS_BOUNDARY = (op.AT_BOUNDARY, op.AT_NON_BOUNDARY)

Ranges = tuple[tuple[int, int], ...]


class UnsupportedPattern(ValueError):
    """The pattern cannot be rewritten within the limits."""


class Term:
    """A regular language. Equal terms are the same object, so comparing and hashing are cheap."""

    __slots__ = ("kind", "number", "parts")

    def __init__(self, kind: str, parts: tuple, number: int) -> None:
        self.kind, self.parts, self.number = kind, parts, number


class Algebra:
    """Creates terms, each only once, so that equal terms are the same object."""

    def __init__(self) -> None:
        self._terms: dict[tuple, Term] = {}
        self._derivatives: dict[tuple[int, int], Term] = {}
        self._work = 0
        self.nothing = self._term("set", ())  # no text
        self.empty = self._term("empty")  # only the empty text
        self.any = self._term("set", ((0, LAST),))  # one character
        self.all = self._term("star", self.any)  # every text
        self.some = self.after(self.any, self.all)  # every text but the empty one

    def _term(self, kind: str, *parts: Any) -> Term:
        found = self._terms.get((kind, parts))
        if found is None:
            if len(self._terms) > MAX_NODES:
                raise UnsupportedPattern("too large")
            found = self._terms[kind, parts] = Term(kind, parts, len(self._terms))
        return found

    def characters(self, ranges: Ranges) -> Term:
        """Return the set of single characters in some ranges."""
        return self._term("set", ranges)

    def after(self, first: Term, then: Term) -> Term:
        """Return the concatenation of two terms."""
        if first is self.nothing or then is self.nothing:
            return self.nothing
        if first is self.empty:
            return then
        if then is self.empty:
            return first
        if first.kind == "after":
            return self.after(first.parts[0], self.after(first.parts[1], then))
        if first is self.all and then is self.all:
            return self.all
        return self._term("after", first, then)

    def repeated(self, term: Term) -> Term:
        """Return any number of repetitions of a term, also none."""
        if term in (self.nothing, self.empty):
            return self.empty
        return term if term.kind == "star" else self._term("star", term)

    def either(self, terms: list[Term]) -> Term:
        """Return the union of terms."""
        found = self._flat("either", terms) - {self.nothing}
        if self.all in found:
            return self.all
        return self._joined("either", found, self.nothing)

    def both(self, terms: list[Term]) -> Term:
        """Return the intersection of terms."""
        found = self._flat("both", terms) - {self.all}
        if self.nothing in found:
            return self.nothing
        if self.empty in found:
            is_there = all(self.has_empty(each) for each in found)
            return self.empty if is_there else self.nothing
        return self._joined("both", found, self.all)

    def negation(self, term: Term) -> Term:
        """Return the complement of a term."""
        if term is self.nothing:
            return self.all
        if term is self.all:
            return self.nothing
        return term.parts[0] if term.kind == "not" else self._term("not", term)

    def _flat(self, kind: str, terms: list[Term]) -> set[Term]:
        found: set[Term] = set()
        for term in terms:
            found |= {*term.parts} if term.kind == kind else {term}
        self._count(len(found))
        return found

    def _count(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise UnsupportedPattern("too much work")

    def _joined(self, kind: str, terms: set[Term], neutral: Term) -> Term:
        if len(terms) < 2:
            return next(iter(terms), neutral)
        return self._term(kind, *sorted(terms, key=lambda each: each.number))

    def has_empty(self, term: Term) -> bool:
        """Return True if a term contains the empty text."""
        kind = term.kind
        if kind in ("empty", "star"):
            return True
        if kind in ("after", "both"):
            return all(map(self.has_empty, term.parts))
        if kind == "either":
            return any(map(self.has_empty, term.parts))
        return kind == "not" and not self.has_empty(term.parts[0])

    def derivative(self, term: Term, character: int) -> Term:
        """Return the derivative: what may follow `character` in the texts of a term."""
        key = (term.number, character)
        found = self._derivatives.get(key)
        if found is None:
            self._count(1)
            found = self._derivatives[key] = self._derive(term, character)
        return found

    def _derive(self, term: Term, character: int) -> Term:
        kind = term.kind
        if kind == "set":
            return (
                self.empty if any(a <= character <= b for a, b in term.parts[0]) else self.nothing
            )
        if kind == "empty":
            return self.nothing
        if kind == "star":
            return self.after(self.derivative(term.parts[0], character), term)
        if kind == "not":
            return self.negation(self.derivative(term.parts[0], character))
        if kind == "after":
            first = self.after(self.derivative(term.parts[0], character), term.parts[1])
            if not self.has_empty(term.parts[0]):
                return first
            return self.either([first, self.derivative(term.parts[1], character)])
        join = self.either if kind == "either" else self.both
        return join([self.derivative(each, character) for each in term.parts])

    def borders(self) -> list[int]:
        """Return the first characters of classes; all characters of a class behave the same."""
        found = {0}
        for term in self._terms.values():
            if term.kind == "set":
                found |= {edge for a, b in term.parts[0] for edge in (a, b + 1)}
        return sorted(edge for edge in found if edge <= LAST)

    def language(self, items: list, then: Term, *, is_start: bool | None) -> Term:
        """Return the texts that start with parsed items and continue with a text of `then`.

        `is_start`: True at the start of the text; None if this may be the start.
        """
        if not items:
            return then
        (code, value), rest = items[0], items[1:]
        if code in (op.ASSERT, op.ASSERT_NOT):
            return self._look(code, value, rest, then, is_start)
        if code is op.AT:
            return self._anchor(value, rest, then, is_start)
        if code is op.SUBPATTERN:
            if value[1] or value[2]:
                raise UnsupportedPattern("flags")
            return self._grouped([value[3]], rest, then, is_start)
        if code is op.BRANCH:
            return self._grouped(value[1], rest, then, is_start)
        if code in (op.MAX_REPEAT, op.MIN_REPEAT):
            return self._repeat(value, rest, then, is_start)
        follows = self.language(rest, then, is_start=False)
        return self.after(self.characters(_ranges(code, value)), follows)

    def _look(self, code: Any, value: tuple, rest: list, then: Term, is_start: Any) -> Term:
        direction, inner = value
        if direction < 0:
            raise UnsupportedPattern("looks behind")
        ahead = self.language(list(inner), self.all, is_start=is_start)
        if code is op.ASSERT_NOT:
            ahead = self.negation(ahead)
        return self.both([ahead, self.language(rest, then, is_start=is_start)])

    def _anchor(self, where: Any, rest: list, then: Term, is_start: Any) -> Term:
        if where in HAS_BOUNDARY:
            raise UnsupportedPattern("a word boundary")
        follows = self.language(rest, then, is_start=is_start)
        if where in (op.AT_END, op.AT_END_STRING):
            return self.both([self.empty, follows])
        if is_start is None:
            raise UnsupportedPattern("^ after a part that may be empty")
        return follows if is_start else self.nothing

    def _grouped(self, branches: list, rest: list, then: Term, is_start: Any) -> Term:
        found = []
        for branch in branches:
            follows = self.language(rest, then, is_start=_start_behind(branch, is_start))
            found.append(self.language(list(branch), follows, is_start=is_start))
        return self.either(found)

    def _repeat(self, value: tuple, rest: list, then: Term, is_start: Any) -> Term:
        low, high, inner = value
        behind = is_start and (None if low == 0 else _start_behind(inner, is_start))
        follows = self.language(rest, then, is_start=behind)
        if low > MAX_REPEAT or (high is not op.MAXREPEAT and high > MAX_REPEAT):
            raise UnsupportedPattern(f"repeats more than {MAX_REPEAT} times")
        items = list(inner)
        if not _asserts(items):
            return self._plain_repeat(
                low, high, self.language(items, self.empty, is_start=False), follows
            )
        if high is op.MAXREPEAT:
            return self._tempered(low, items, follows)
        found = follows
        for count in range(high, 0, -1):
            more = self.language(items, found, is_start=False if is_start is False else None)
            found = more if count <= low else self.either([more, follows])
        return found

    def _plain_repeat(self, low: int, high: Any, term: Term, follows: Term) -> Term:
        found = follows
        if high is op.MAXREPEAT:
            found = self.after(self.repeated(term), follows)
        else:
            for _ in range(high - low):
                found = self.either([self.after(term, found), follows])
        for _ in range(low):
            found = self.after(term, found)
        return found

    def _tempered(self, low: int, items: list, follows: Term) -> Term:
        """Return the term of `(?:(?!X)c)*` at the end of a text: X matches at none of the c."""
        is_form = len(items) == 2 and items[0][0] is op.ASSERT_NOT and items[0][1][0] > 0
        if low or not is_form or follows is not self.empty or _asserts(items[1:]):
            raise UnsupportedPattern("look-around that is repeated")
        unwanted = self.language(list(items[0][1][1]), self.all, is_start=False)
        if self.has_empty(unwanted):
            raise UnsupportedPattern("look-around that is repeated")
        one = self.language(items[1:], self.empty, is_start=False)
        return self.both([self.repeated(one), self.negation(self.after(self.all, unwanted))])


def _start_behind(branch: Any, is_start: bool | None) -> bool | None:
    """Return `is_start` after a branch: True if the branch is always empty, None if it may be."""
    if not is_start:
        return is_start
    least, most = branch.getwidth()
    return False if least else (True if not most else None)


def _asserts(items: list) -> bool:
    for code, value in items:
        if code in (op.ASSERT, op.ASSERT_NOT, op.AT):
            return True
        if code is op.SUBPATTERN:
            inner = [value[3]]
        elif code is op.BRANCH:
            inner = value[1]
        elif code in (op.MAX_REPEAT, op.MIN_REPEAT):
            inner = [value[2]]
        else:
            inner = []
        if any(_asserts(list(each)) for each in inner):
            return True
    return False


DIGITS = ((48, 57),)
WORD = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE = ((9, 13), (32, 32), (160, 160), (8232, 8233), (65279, 65279))
CATEGORIES = {
    op.CATEGORY_DIGIT: DIGITS,
    op.CATEGORY_WORD: WORD,
    op.CATEGORY_SPACE: SPACE,
}
NEGATED = {
    op.CATEGORY_NOT_DIGIT: DIGITS,
    op.CATEGORY_NOT_WORD: WORD,
    op.CATEGORY_NOT_SPACE: SPACE,
}


def _ranges(code: Any, value: Any) -> Ranges:
    """Return the characters of one parsed item."""
    if code is op.LITERAL:
        return ((value, value),)
    if code is op.NOT_LITERAL:
        return _others(((value, value),))
    if code is op.ANY:
        return _others(((10, 10),))
    if code is not op.IN:
        raise UnsupportedPattern(str(code).lower())
    found: list[tuple[int, int]] = []
    for kind, member in value:
        if kind is op.LITERAL:
            found.append((member, member))
        elif kind is op.RANGE:
            found.append(member)
        elif kind is op.CATEGORY:
            found += CATEGORIES.get(member) or _others(NEGATED[member])
    ranges = merged(found)
    return _others(ranges) if value[0][0] is op.NEGATE else ranges


def merged(ranges: list[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _others(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for pair in ranges for edge in pair), LAST + 1]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low + 1, high - 1) for low, high in pairs if high - low > 1)
