"""Products of many rows that two kernels compute: the choice, and that together they are right."""

import pytest
import torch

from formats.in_memory.packed import PackedWeight
from formats.scheme import QuantSpec
from qkernels.linear.ops import plan_linear
from qkernels.wna16.gemm import rows_of_tiles
from qkernels.wna16.sm90_large_m_config import default_large_m_config, large_m_time, other_time

gemm = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

H200 = 132
GATE_UP, DOWN = (28672, 4096), (4096, 14336)
SPEC = QuantSpec(bits=4, symmetric=True, group_size=128)


def rows(M, N, K, bits=4):
    return rows_of_tiles(M, N, K, 128, bits, H200)


@pytest.mark.parametrize("sizes", [GATE_UP, DOWN])
def test_tail_rows_after_whole_waves(sizes):
    assert rows(1024, *sizes) is None
    assert rows(1025, *sizes) == rows(1032, *sizes) == rows(1088, *sizes) == 1024
    assert rows(1089, *sizes) is None, "more than sm90_small_m takes"
    assert rows(64, *sizes) is None
    assert rows(1032, *sizes, bits=8) is None


def test_split_is_used_only_if_predicted_faster():
    found = 0
    for N, K in (GATE_UP, DOWN, (6144, 4096), (4096, 4096), (1152, 896)):
        for M in range(65, 3000, 7):
            tiles = rows(M, N, K)
            if tiles is None:
                continue
            sizes = N, K, 128, 4, H200
            whole = default_large_m_config(M, *sizes)
            alone = other_time(M, *sizes) if whole is None else large_m_time(whole, M, N, K)
            assert large_m_time(default_large_m_config(tiles, *sizes), tiles, N, K) < alone
            assert tiles % 128 == 0 and 0 < M - tiles <= 64
            found += 1
    assert found > 20


@pytest.fixture
def weight(monkeypatch):
    """Return a weight of 4096 x 14336, planned for an H200; it has one number per output."""

    def make(kernel=None):
        packed = PackedWeight(
            words_NW=torch.zeros(8, DOWN[1] // 8, dtype=torch.int32),
            scales_NG=torch.ones(8, DOWN[1] // 128).half(),
            zeros_NG=torch.full((8, DOWN[1] // 128), 8, dtype=torch.uint8),
            spec=SPEC,
            in_features=DOWN[1],
        )
        prepared = gemm.prepare_weight(packed, torch.bfloat16)
        object.__setattr__(prepared, "out_features", DOWN[0])
        object.__setattr__(prepared, "requested", kernel)
        prepared.__post_init__()
        shape = gemm.Shape(N=DOWN[0], K=DOWN[1], spec=SPEC, sm_count=H200)
        monkeypatch.setattr(gemm, "shape_of", lambda problem: shape)
        return prepared

    return make


def test_explicit_kernel_choice_disables_row_split(weight):
    plan = plan_linear(weight(), 1032)
    assert plan.variant == "sm90_large_m" and plan.rows == 1024
    assert plan.tail.variant == "sm90_small_m" and plan.tail.tail is None
    for choice in ("sm90_large_m", "-sm90_small_m", "triton"):
        assert plan_linear(weight(choice), 1032).tail is None


def test_rows_of_both_kernels_equal_product(weight, monkeypatch):
    calls = []

    class Kernel:
        def __init__(self, name):
            self.name = name

        def run(self, x_MK, weight, bias, config, y_MN):
            calls.append((self.name, x_MK.shape[0], type(config).__name__))
            y_MN.copy_(x_MK[:, :1] + bias)
            return y_MN

    monkeypatch.setattr(gemm, "_module", Kernel)
    prepared = weight()
    x = torch.arange(1040.0)[:, None].expand(-1, DOWN[1]).bfloat16()
    bias = torch.arange(4096.0).bfloat16()
    y = gemm.run(plan_linear(prepared, 1040), x, prepared, bias)
    assert calls == [("sm90_large_m", 1024, "LargeMConfig"), ("sm90_small_m", 16, "SmallMConfig")]
    assert torch.equal(y, x[:, :1] + bias)
