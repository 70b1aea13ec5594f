"""NaN and infinity are found in every float dtype and reported once for all tensors."""

import math

import pytest
import torch

from formats.errors import CheckpointError
from qserve.model.loading.finite_check import FiniteCheck

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_tensors_pass(dtype, device):
    check, ends = FiniteCheck(), torch.finfo(dtype)
    check.add("a", torch.tensor([ends.min, 0, ends.max], device=device).to(dtype))
    check.add("empty", torch.empty(0, dtype=dtype, device=device))
    check.add("codes", torch.tensor([1, 2], device=device))
    check.check()
    FiniteCheck().check()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_single_nonfinite_value_is_found(dtype, device):
    values = torch.tensor([math.nan, math.inf, -math.inf]).to(dtype).to(device)
    for value in values[~values.float().isfinite()]:  # float8_e4m3fn has no infinity
        for place in (0, 4999, 9999):
            tensor = torch.zeros(100, 100).to(dtype).to(device)
            tensor.view(-1)[place] = value
            check = FiniteCheck()
            check.add("good", torch.ones(3, device=device))
            check.add("bad", tensor)
            with pytest.raises(CheckpointError, match="^bad: NaN or infinity among the weights"):
                check.check()


def test_many_tensors_are_counted():
    check = FiniteCheck()
    for number in range(12):
        check.add(f"layers.{number}.norm", torch.tensor([math.nan]))
    with pytest.raises(CheckpointError, match=r"^layers\.\*\.norm \(12\): NaN"):
        check.check()
    check.check()  # nothing is reported twice
