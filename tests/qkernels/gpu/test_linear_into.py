"""Products that write their result to a part of a given tensor, as those of a chunk of rows do."""

import pytest
import torch

from qkernels import QuantLinear, ops

pytestmark = pytest.mark.gpu
SCHEMES = ("w4a16-sym", "w4a16-asym", "w8a16-sym", "w8a8", "w4a8")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [40, 512, 1000, 2056])
def test_only_requested_rows_are_written(scheme, rows):
    torch.manual_seed(0)
    weight = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16)
    layer = QuantLinear.from_float(weight, scheme).prepare(torch.bfloat16, "cuda")
    plan = layer.plan(rows)
    x = ops.in_form(torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16), plan.input)
    target = torch.full((rows + 2, 1024), float("nan"), device="cuda", dtype=torch.bfloat16)
    layer(x, plan, out=target[1:-1])
    assert torch.equal(target[1:-1], layer(x, plan))
    assert target[[0, -1]].isnan().all()
