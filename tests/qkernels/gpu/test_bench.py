"""Every operation of the bench command runs and is right."""

import pytest
import torch

from qkernels.bench.measure import CEILINGS, measure
from qkernels.bench.table import OPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="measures a GPU")
@pytest.mark.parametrize("name", OPS)
def test_every_operation_can_be_measured(name):
    op = OPS[name]
    shape = next(iter(op.shapes))
    for each in op.cases(shape, (2,), frozenset(op.baselines) - {"gemlite"}):
        measured = measure(each, CEILINGS["NVIDIA H200"])
        assert measured.microseconds > 0 and measured.error <= each.allowed_error
        assert all(time > 0 for time in measured.baselines.values())
