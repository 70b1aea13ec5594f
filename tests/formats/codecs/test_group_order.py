"""Groups of inputs that a file states: adjacent ones need no order, others are sorted."""

import pytest
import torch

from formats.codecs.group_order import order_of_groups
from formats.errors import CheckpointError


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_contiguous_groups_have_no_permutation(dtype):
    for groups, length in ((1, 8), (4, 8), (8, 1)):
        g_idx = torch.arange(groups, dtype=dtype).repeat_interleave(length)
        assert order_of_groups(g_idx, groups, "w") == (None, None, length)


def test_noncontiguous_groups_are_sorted():
    g_idx = torch.tensor([1, 0, 1, 0])
    order, source, length = order_of_groups(g_idx, 2, "w")
    assert order.tolist() == [1, 3, 0, 2] and source is None and length == 2
    # the same inputs, but of groups of other sizes than those of the scales
    order, source, length = order_of_groups(torch.tensor([0, 0, 0, 0, 1, 1]), 2, "w")
    assert order is None and source.tolist() == [0, 0, 1] and length == 2


@pytest.mark.parametrize(("g_idx", "groups"), [([0, 0, 2, 2], 2), ([-1, 0, 0, 1], 2), ([0, 0], 0)])
def test_missing_groups_are_refused(g_idx, groups):
    with pytest.raises(CheckpointError, match="w.g_idx: expected groups 0"):
        order_of_groups(torch.tensor(g_idx), groups, "w")
