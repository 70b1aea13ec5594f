"""Which messages of a conversation go, oldest first, so that the rest fits. Knows no tokens.

OpenAI's `truncation: "auto"` drops items from the beginning. Here what belongs together goes
together, since chat templates refuse the half of it: a user's message with the answers to it, and
after the last of these a call with its outputs. The system's messages, the last message of a user
and what came last always stay.
"""

import bisect
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

SYSTEM = ("system", "developer")
USER, TOOL = "user", "tool"


def can_go(roles: Sequence[str]) -> list[list[int]]:
    """The groups of messages, by their places, that may go, in this order."""
    said = [place for place, role in enumerate(roles) if role not in SYSTEM]
    users = [at for at, place in enumerate(said) if roles[place] == USER]
    last = users[-1] if users else -1  # of `said`; what follows it is in groups of its own
    starts = {0, *users} if users else set()
    starts |= {at for at in range(last + 1, len(said)) if roles[said[at]] != TOOL}
    edges = [*sorted(starts), len(said)]
    groups = [said[a:b] for a, b in pairwise(edges) if a != last]
    # What came last is what is answered: that of the user, or else the last group.
    return groups if last == len(said) - 1 else groups[:-1]


def most_that_fit(messages: Sequence[Any], fits: Callable[[list[Any]], bool]) -> list[Any]:
    """The messages without the fewest groups that have to go; where none fits, the least.

    `fits` is asked a number of times that grows with the logarithm of the messages.
    """
    groups = can_go([message.role for message in messages])

    def without(count: int) -> list[Any]:
        gone = {place for group in groups[:count] for place in group}
        return [each for place, each in enumerate(messages) if place not in gone]

    if fits(list(messages)):
        return list(messages)
    counts = range(1, len(groups))
    return without(1 + bisect.bisect_left(counts, True, key=lambda count: fits(without(count))))
