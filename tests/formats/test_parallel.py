"""Which numbers of GPUs a checkpoint's linears can be split over."""

import pytest

from formats.linear_summary import LinearSummary
from formats.parallel import parallel_sizes
from formats.quant_config import QuantConfig
from formats.scheme import Scheme


@pytest.mark.parametrize(
    ("scheme", "shape", "reasons"),
    [
        # words of 8 outputs, whatever the group
        ("w4a16-sym", (24, 128), {1: "", 2: "a share of 12 is not divisible by 8"}),
        ("w4a16-sym", (128, 24), {1: "", 2: "", 4: ""}),
        # float8 has no words
        ("w8a8-fp8", (24, 128), {1: "", 2: "", 4: "", 8: ""}),
        ("w8a8-fp8-block", (512, 128), {2: "", 4: "", 8: "a share of 64 is not divisible by 128"}),
    ],
)
def test_shares_of_outputs(scheme, shape, reasons):
    method = "compressed-tensors" if "fp8" in scheme else "gptq"
    quant = QuantConfig(scheme=Scheme.parse(scheme), method=method)
    name = "model.layers.0.self_attn.q_proj"
    linear = LinearSummary(
        name=name, out_features=shape[0], in_features=shape[1], scheme=scheme, num_bytes=0
    )
    found = parallel_sizes({}, quant, [linear])
    assert {size: found[size] for size in reasons} == {
        size: f"{name}: {reason}" if reason else "" for size, reason in reasons.items()
    }
