"""The order in which the 8-bit product for sm_90 keeps a weight's codes."""

import pytest
import torch

sm90 = pytest.importorskip("qkernels.w8a8.sm90", exc_type=ImportError)


@pytest.mark.parametrize("N, K", [(128, 256), (72, 160), (8, 32)])
def test_codes_are_in_tma_box_order(N, K):
    codes_NK = (torch.arange(N * K) % 251 - 125).to(torch.int8).view(N, K)
    boxes = sm90.in_tma_boxes(codes_NK)
    assert boxes.is_contiguous() and boxes.dtype == torch.int8
    assert boxes.shape == (-(-N // 64), -(-K // 128), 64, 128)
    n, k = torch.meshgrid(torch.arange(N), torch.arange(K), indexing="ij")
    assert torch.equal(boxes[n // 64, k // 128, n % 64, k % 128], codes_NK)
    assert int(boxes.long().abs().sum()) == int(codes_NK.long().abs().sum()), "zeros fill up"


def test_w8a8_order_golden_bytes():
    codes_NK = torch.zeros(128, 256, dtype=torch.int8)
    codes_NK[0, 1], codes_NK[1, 0], codes_NK[0, 128], codes_NK[64, 0] = 1, 2, 3, 4
    flat = sm90.in_tma_boxes(codes_NK).flatten()
    assert flat.nonzero().flatten().tolist() == [1, 128, 64 * 128, 2 * 64 * 128]
    assert flat[flat != 0].tolist() == [1, 2, 3, 4]


def test_float8_order_keeps_bits():
    codes_NK = torch.randn(72, 160).to(torch.float8_e4m3fn)
    boxes = sm90.in_tma_boxes(codes_NK)
    assert boxes.dtype == torch.float8_e4m3fn
    assert torch.equal(boxes.view(torch.int8), sm90.in_tma_boxes(codes_NK.view(torch.int8)))
