"""Placement of experts on ranks: all are placed once, and loads are about equal."""

import json
import random

import pytest

from formats.errors import InputError
from qserve.parallel.expert_placement import (
    COUNTS,
    ExpertPlacement,
    balanced,
    imbalance,
    linear,
    read_loads,
    round_robin,
    write_loads,
)


@pytest.mark.parametrize(("E", "n"), [(8, 2), (5, 2), (128, 3), (7, 7)])
def test_every_expert_is_on_exactly_one_rank(E, n):
    rng = random.Random(E)
    loads = [rng.randrange(100) for _ in range(E)]
    for placement in (linear(E, n), round_robin(E, n), balanced(loads, n)):
        assert sorted(e for experts in placement for e in experts) == list(range(E))
        sizes = {len(experts) for experts in placement}
        assert max(sizes) - min(sizes) <= 1
        assert all(list(experts) == sorted(experts) for experts in placement)


def test_contiguous_and_round_robin_placement():
    assert linear(5, 2) == ((0, 1, 2), (3, 4))
    assert round_robin(5, 2) == ((0, 2, 4), (1, 3))


def test_expert_loads_are_balanced():
    """Loads as of a few popular experts next to each other, as routers of real models have."""
    rng = random.Random(1)
    loads = [round(1000 / (1 + e) + rng.randrange(20)) for e in range(128)]
    assert imbalance(loads, linear(128, 4)) > 2
    # the most popular expert alone is more than a quarter of a rank: no placement is even
    assert imbalance(loads, balanced(loads, 4)) < 1.05
    assert imbalance([0] * 8, linear(8, 2)) == 1


def test_placement_file_covers_its_layers(tmp_path):
    file = tmp_path / "loads.json"
    write_loads(file, [[0] * 4, [5, 5, 1, 1]], "model")
    assert json.loads(file.read_text())["model"] == "model"
    placement = ExpertPlacement.make(str(file), 4, 2)
    assert placement.of_layer(0) == placement.of_layer(2) == linear(4, 2)
    assert placement.of_layer(1) == ((0, 2), (1, 3))
    text = "Ranks hold 2 + 2 experts of a layer"
    assert linear_text(4, 2) == text
    placed = ", placed by loads: the busiest rank has 1.00 times the mean load, in runs 1.67"
    assert placement.to_text() == text + placed


def linear_text(num_experts, num_ranks):
    return ExpertPlacement.make("linear", num_experts, num_ranks).to_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected a list of rows"),
        ({COUNTS: []}, "expected a list of rows"),
        ({COUNTS: [1]}, "expected a list of rows"),
        ({COUNTS: [[1, 2, 3]]}, "layer 0: expected 4 counts"),
        ({COUNTS: [[1, 2, 3, 4], [1, 2, 3, -4]]}, "layer 1: expected 4 counts"),
        ({COUNTS: [[1, 2, 3, 4.5]]}, "layer 0: expected 4 counts"),
        (None, "cannot be read"),
    ],
)
def test_invalid_placement_files_are_refused(tmp_path, content, message):
    file = tmp_path / "loads.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(InputError, match=message):
        read_loads(file, 4)
