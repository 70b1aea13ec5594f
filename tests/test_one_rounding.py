"""The file that `quantize` writes and the layer that `from_float` makes are the same bits."""

import pytest
import torch

from calibrate.pipeline import quantize_checkpoint
from formats.checkpoint import CheckpointReader
from formats.scheme import Scheme
from qkernels import QuantLinear


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["w4a16-sym", "w4a16-sym-g32", "w8a16-sym", "w4a16-sym-channel"])
def test_from_float_equals_quantize(scheme, docs_5m, tmp_path):
    quantize_checkpoint(
        docs_5m, tmp_path / "q", scheme=Scheme.parse(scheme), recipe="rtn", progress=False
    )
    source, written = CheckpointReader(docs_5m), CheckpointReader(tmp_path / "q")
    names = [name.removesuffix(".qweight") for name in written.entries if "qweight" in name]
    assert len(names) == 28
    for name in names:
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.weight = torch.nn.Parameter(source.get(f"{name}.weight"))
        state = QuantLinear.from_float(linear, scheme).state_dict()
        assert set(state) == {"qweight", "qzeros", "scales", "g_idx"}
        for field, tensor in state.items():
            stored = written.get(f"{name}.{field}")
            assert tensor.dtype == stored.dtype and torch.equal(tensor, stored), f"{name}.{field}"
