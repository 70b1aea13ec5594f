"""MXFP4 by hand: every number of 4 bits, the order of nibbles, the scale bytes."""

import pytest
import torch

from formats.codecs import mxfp4
from formats.errors import CheckpointError

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_every_code_and_nibble_order():
    """Byte i has inputs 2 i and 2 i + 1, the first in the low bits."""
    nibbles = [*range(16), *range(16)]
    block = torch.tensor([nibbles[2 * i] | nibbles[2 * i + 1] << 4 for i in range(16)])
    blocks = block.to(torch.uint8).expand(3, 2, 16)
    scales = torch.tensor([[127, 128], [126, 9], [251, 100]], dtype=torch.uint8)
    weight = mxfp4.decode(blocks, scales)
    weight.check()
    row = torch.tensor([*NUMBERS, *(-number for number in NUMBERS)] * 2, dtype=torch.float64)
    factors = 2.0 ** (scales.double() - 127)
    want = torch.cat([factors[:, :1] * row, factors[:, 1:] * row], 1)
    assert torch.equal(weight.dequantize(torch.float64), want)


def test_weights_equal_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (2, 6, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(110, 130, (2, 6, 3), generator=generator).to(torch.uint8)
    theirs_EKN = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for e in range(2):
        ours_NK = mxfp4.decode(blocks[e], scales[e]).dequantize()
        assert torch.equal(ours_NK.t(), theirs_EKN[e])


def test_invalid_mxfp4_tensors_are_refused():
    blocks = torch.zeros(2, 1, 16, dtype=torch.uint8)
    scales = torch.full((2, 1), 255, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="w scales: contain NaN"):
        mxfp4.decode(blocks, scales, "w")
    with pytest.raises(CheckpointError, match=r"w: expected uint8 blocks \[2, 1, 16\]"):
        mxfp4.decode(blocks[..., :8], scales, "w")
