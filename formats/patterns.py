"""Match module names against untrusted patterns in bounded time.

Python's `re` backtracks: `(a+)+$` takes minutes on thirty letters. Here a pattern is a function
from a set of start positions to the set of end positions, so the time is bounded by the sizes of
pattern and name. A set is an integer whose bit i means position i.

No library does this. Configurations use lookahead, which RE2 lacks. `regex` has a time limit, but
takes gigabytes to compile nested repeats such as `((a+)+)+`, 22 deep.
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial
from re import _constants as op
from re import _parser as parser
from re import error as RegexError
from typing import Any

from formats.errors import CheckpointError

MAX_PATTERN_CHARACTERS = 2000
MAX_NAME_CHARACTERS = 500
MAX_REPEAT = 1000
MAX_STEPS = 2_000  # most steps of a match; `.*mlp.*down_proj` on a usual name takes 60
# Steps of all matches of one file. Ten expressions on the 880 linears of 126 layers take 500,000.
MAX_STEPS_OF_FILE = 1_000_000

Positions = int
CHARACTERS = frozenset({op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN})  # items of one character
CLASSES = {
    op.CATEGORY_DIGIT: str.isdecimal,
    op.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    op.CATEGORY_SPACE: str.isspace,
    op.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    op.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    op.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}


class StepBudget:
    """Budget of steps for all matches of one file."""

    def __init__(self, subject: str, steps: int = MAX_STEPS_OF_FILE) -> None:
        self._subject, self._left = subject, steps

    def spend(self, steps: int) -> None:
        """Use steps. Raises CheckpointError if the budget is exceeded."""
        self._left -= steps
        if self._left < 0:
            raise CheckpointError(
                self._subject,
                "its patterns take too long to match against the model's linears",
                "use fewer or simpler patterns, or plain names",
            )


class Regex:
    """Regular expression without back references, matched from the start of a name (`re.match`)."""

    def __init__(self, text: str, subject: str = "pattern") -> None:
        """Raises CheckpointError, with `subject`, on an invalid or unsupported expression."""
        self.text, self.subject = text, f"{subject} {text[:80]!r}"
        if len(text) > MAX_PATTERN_CHARACTERS:
            raise self._refusal(f"is longer than {MAX_PATTERN_CHARACTERS} characters")
        try:
            tree = parser.parse(text)
        except (RegexError, OverflowError, RecursionError) as error:
            raise self._refusal(f"is not a regular expression: {error}") from None
        if tree.state.flags & ~32:  # SRE_FLAG_UNICODE is always set
            raise self._refusal("flags are not supported")
        self._check(list(tree), depth=0)
        self._items = _lists(tree)

    def matches(self, name: str, budget: StepBudget | None = None) -> bool:
        """Return True if the pattern matches at the start of `name`.

        Raises CheckpointError if the budget is exceeded.
        """
        if len(name) > MAX_NAME_CHARACTERS:
            return False
        run = _Run(self, name)
        found = bool(run.sequence(self._items, 1))
        if budget is not None:
            budget.spend(run.steps)
        return found

    def cost(self, name: str) -> int:
        """Return the steps of one match. Raises CheckpointError if there are too many."""
        run = _Run(self, name)
        run.sequence(self._items, 1)
        return run.steps

    def _refusal(self, problem: str) -> CheckpointError:
        return CheckpointError(self.subject, problem, "use plain names, or a simpler expression")

    def _check(self, items: list, depth: int) -> None:
        if depth > 40:
            raise self._refusal("is nested too deeply")
        for code, value in items:
            if code in (op.MAX_REPEAT, op.MIN_REPEAT):
                low, high, inner = value
                if low > MAX_REPEAT or (high is not op.MAXREPEAT and high > MAX_REPEAT):
                    raise self._refusal(f"repeats more than {MAX_REPEAT} times")
                self._check(list(inner), depth + 1)
            elif code is op.SUBPATTERN:
                if value[1] or value[2]:
                    raise self._refusal("flags are not supported")
                self._check(list(value[3]), depth + 1)
            elif code is op.BRANCH:
                for branch in value[1]:
                    self._check(list(branch), depth + 1)
            elif code in (op.ASSERT, op.ASSERT_NOT):
                if value[0] < 0:
                    raise self._refusal("looks behind, which is not supported")
                self._check(list(value[1]), depth + 1)
            elif code not in _Run.STEPS:
                raise self._refusal(f"{str(code).lower()} is not supported")


class _Run:
    """State of one match: the name, and the steps taken so far."""

    def __init__(self, regex: Regex, name: str) -> None:
        self.regex, self.name = regex, name
        self.steps = 0
        self.everywhere = (1 << len(name)) - 1
        self.places = _places(name)

    def sequence(self, items: Any, starts: Positions) -> Positions:
        for code, value in items:
            if not starts:
                return 0
            self._count()
            starts = self.STEPS[code](self, value, starts)
        return starts

    def _count(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise self.regex._refusal("takes too long to match")

    def _one(self, fits: Callable[[str], bool], starts: Positions) -> Positions:
        found = 0
        for character, places in self.places.items():
            if places & starts and fits(character):
                found |= places
        return (starts & found) << 1

    def _literal(self, value: int, starts: Positions) -> Positions:
        return (starts & self.places.get(chr(value), 0)) << 1

    def _not_literal(self, value: int, starts: Positions) -> Positions:
        return (starts & self.everywhere & ~self.places.get(chr(value), 0)) << 1

    def _any(self, _: None, starts: Positions) -> Positions:
        return self._not_literal(ord("\n"), starts)

    def _in(self, members: list, starts: Positions) -> Positions:
        negated = members[0][0] is op.NEGATE

        def fits(character: str) -> bool:
            found = False
            for code, value in members:
                if code is op.LITERAL:
                    found = found or ord(character) == value
                elif code is op.RANGE:
                    found = found or value[0] <= ord(character) <= value[1]
                elif code is op.CATEGORY:
                    found = found or CLASSES[value](character)
            return found != negated

        return self._one(fits, starts)

    def _branch(self, value: tuple, starts: Positions) -> Positions:
        ends = 0
        for branch in value[1]:
            ends |= self.sequence(branch, starts)
        return ends

    def _group(self, value: tuple, starts: Positions) -> Positions:
        return self.sequence(value[3], starts)

    def _repeat(self, value: tuple, starts: Positions) -> Positions:
        low, high, inner = value
        step = self._step_of(inner)
        for _ in range(low):
            starts = step(starts)
        reached = fresh = starts
        rounds = low
        while fresh and (high is op.MAXREPEAT or rounds < high):
            fresh = step(fresh) & ~reached
            reached |= fresh
            rounds += 1
            self._count()
        return reached

    def _step_of(self, items: list) -> Callable[[Positions], Positions]:
        """Return the step of repeated items; of a single character, it needs no search."""
        if len(items) != 1 or items[0][0] not in CHARACTERS:
            return partial(self.sequence, items)
        code, value = items[0]
        fits = self.STEPS[code](self, value, self.everywhere) >> 1

        def step(starts: Positions) -> Positions:
            if starts:
                self._count()
            return (starts & fits) << 1

        return step

    def _at(self, where: Any, starts: Positions) -> Positions:
        end = 1 << len(self.name)
        if where in (op.AT_BEGINNING, op.AT_BEGINNING_STRING):
            return starts & 1
        if where in (op.AT_END, op.AT_END_STRING):
            return starts & end
        word = CLASSES[op.CATEGORY_WORD]
        kinds = [False, *map(word, self.name), False]
        edges = sum(1 << i for i in range(len(self.name) + 1) if kinds[i] != kinds[i + 1])
        return starts & (edges if where is op.AT_BOUNDARY else ~edges)

    def _ahead(self, value: tuple, starts: Positions, wanted: bool = True) -> Positions:
        kept = 0
        for position in range(len(self.name) + 1):
            start = 1 << position
            if starts & start and bool(self.sequence(value[1], start)) == wanted:
                kept |= start
        return kept

    def _not_ahead(self, value: tuple, starts: Positions) -> Positions:
        return self._ahead(value, starts, wanted=False)

    STEPS = {
        op.LITERAL: _literal,
        op.NOT_LITERAL: _not_literal,
        op.ANY: _any,
        op.IN: _in,
        op.BRANCH: _branch,
        op.SUBPATTERN: _group,
        op.MAX_REPEAT: _repeat,
        op.MIN_REPEAT: _repeat,
        op.AT: _at,
        op.ASSERT: _ahead,
        op.ASSERT_NOT: _not_ahead,
    }


def _lists(items: Any) -> list:
    """Return the items of a parsed expression in lists, which are read faster."""
    found = []
    for code, value in items:
        if code in (op.MAX_REPEAT, op.MIN_REPEAT, op.SUBPATTERN, op.ASSERT, op.ASSERT_NOT):
            *head, inner = value
            value = (*head, _lists(inner))
        elif code is op.BRANCH:
            value = (value[0], [_lists(branch) for branch in value[1]])
        found.append((code, value))
    return found


@lru_cache(maxsize=256)  # a name is matched against each rule of a config
def _places(name: str) -> dict[str, Positions]:
    """Return the positions of each character of a name."""
    places: dict[str, Positions] = {}
    for position, character in enumerate(name):
        places[character] = places.get(character, 0) | 1 << position
    return places


def wildcard(text: str) -> str:
    """Return an expression that matches whole names, where `*` matches any text."""
    return ".*".join(re.escape(part) for part in text.split("*")) + "$"


@lru_cache(maxsize=4096)
def regex(text: str, subject: str = "pattern") -> Regex:
    """Return a cached Regex."""
    return Regex(text, subject)
