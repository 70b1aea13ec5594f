"""The few tested combinations of parameters include every value and every pair."""

from itertools import combinations, product

import pytest

from tests.qkernels.parameter_pairs import diagonal, with_every_pair


def pairs_of(values):
    return {pair for own in values for pair in combinations(enumerate(own), 2)}


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (2, 3, 4), (6, 2, 5, 2), (1, 3, 1, 3, 2)])
def test_every_value_and_pair_is_covered(sizes):
    names = [
        [f"{parameter}{i}" for i in range(n)] for parameter, n in zip("abcde", sizes, strict=False)
    ]
    values = list(product(*names))
    quick = diagonal(values)
    assert quick <= set(values) and len(quick) == max(sizes)
    assert {name for own in quick for name in own} == {name for each in names for name in each}
    thorough = with_every_pair(values, quick)
    assert quick <= thorough <= set(values)
    assert pairs_of(thorough) == pairs_of(values)
    # two parameters alone are all their pairs; of more, most combinations repeat pairs
    assert len(sizes) > 2 or len(thorough) == len(values)
    assert len(sizes) < 4 or len(thorough) <= len(values) // 2


def test_missing_combinations_are_not_required():
    """For a list of cases instead of a product, and for a case that was requested by name."""
    cases = [("a", "x", "1"), ("b", "x", "2"), ("b", "y", "1")]
    assert with_every_pair(cases, diagonal(cases)) == set(cases)
    assert with_every_pair(cases[1:2], diagonal(cases[1:2])) == {cases[1]}
