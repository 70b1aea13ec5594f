"""Which combinations of parameters are tested where all of them would take too long."""

from itertools import combinations

Values = tuple[str, ...]  # one of each parameter


def diagonal(values: list[Values]) -> set[Values]:
    """Enough for every value of every parameter: the first of each, the second of each, .."""
    # every value in order of its appearance
    known = [list(dict.fromkeys(of_parameter)) for of_parameter in zip(*values, strict=True)]
    return {tuple(each[i % len(each)] for each in known) for i in range(max(map(len, known)))}


def with_every_pair(values: list[Values], first: set[Values]) -> set[Values]:
    """Return `first` and a few more combinations, so that every pair of values is in one."""
    if len(values[0]) < 3:
        return set(values)
    pairs = {own: set(combinations(enumerate(own), 2)) for own in values}
    chosen = first & set(values)
    missing = set().union(*pairs.values()).difference(*(pairs[own] for own in chosen))
    while missing:
        best = max(pairs, key=lambda own: len(pairs[own] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return chosen
