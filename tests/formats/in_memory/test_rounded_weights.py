"""round_to_nearest refuses what is no weight of a linear, with every scheme."""

import pytest
import torch

from formats.errors import CheckpointError
from formats.in_memory.weights import round_to_nearest
from formats.scheme import Scheme

SCHEMES = ("w4a16-sym", "w4a16-mxfp4", "w4a16-nvfp4", "w8a8-fp8", "w8a8-fp8-block")
WRONG = {
    "one dim": (torch.ones(128), r"expected a float weight \[N, K\], found torch.float32 \[128\]"),
    "three dims": (torch.ones(2, 64, 128), r"found torch.float32 \[2, 64, 128\]"),
    "integers": (torch.ones(64, 128, dtype=torch.int64), r"found torch.int64 \[64, 128\]"),
    "no inputs": (torch.ones(64, 0), r"is empty: \[64, 0\]"),
    "no outputs": (torch.ones(0, 128), r"is empty: \[0, 128\]"),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_weights_are_refused_by_name(scheme, wrong):
    weight, message = WRONG[wrong]
    with pytest.raises(CheckpointError, match=f"up_proj: .*{message}"):
        round_to_nearest(weight, Scheme.parse(scheme).weight, "up_proj")
