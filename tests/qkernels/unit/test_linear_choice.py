"""Which body takes a product: limbs that are there already change where a ring pays."""

from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.operands.limbs import LimbForm
from qkernels.wna16.configs import default_config
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig
from qkernels.wna16.triton_config import TritonGemmConfig

w4a16 = pytest.importorskip("qkernels.wna16.gemm", exc_type=ImportError)

H200 = 132


def kind(M, N, K, made, gluon=True, bits=4, group=128):
    tile = default_config(M, N, K, group, bits, H200, gluon, made)
    return type(tile), getattr(tile, "rows", None)


@pytest.mark.parametrize("M", [1, 4])
def test_few_rows_take_digits_that_are_there(M):
    for N, K in ((4096, 4096), (4096, 14336), (128256, 4096)):
        assert kind(M, N, K, made=True) == (GemvImmaConfig, None)


def test_digits_that_have_to_be_made_are_for_two_rows_or_very_large_weights():
    assert kind(2, 4096, 4096, made=False) == (GemvImmaConfig, None)
    assert kind(3, 4096, 4096, made=False) == (SmallMConfig, 8)
    assert kind(1, 4096, 14336, made=False) == (SmallMConfig, 8), "a long kernel makes them"
    for M in (1, 4):
        assert kind(M, 128256, 4096, made=False) == (GemvImmaConfig, None)
        assert kind(M, 4096, 14336, made=False, bits=8) == (GemvImmaConfig, None)


@pytest.mark.parametrize("M, rows", [(5, 8), (9, 16), (17, 32), (33, 64), (64, 64)])
@pytest.mark.parametrize("made", [False, True])
def test_up_to_64_rows_take_the_ring(M, rows, made):
    for N, K in ((896, 896), (4096, 4096), (128256, 4096)):
        assert kind(M, N, K, made) == (SmallMConfig, rows)
    assert kind(M, 4096, 4096, made, bits=8)[0] is not SmallMConfig
    assert kind(65, 4096, 4096, made)[0] is LargeMConfig


def test_without_gluon_or_in_other_groups_the_portable_body_stays():
    for M in (1, 8):
        assert kind(M, 28672, 4096, made=True, gluon=False) == (TritonGemmConfig, None)
        assert kind(M, 28672, 4096, made=True, group=64) == (TritonGemmConfig, None)


@pytest.mark.parametrize(
    "tile, form",
    [
        (GemvImmaConfig(), LimbForm(bits=4, with_sums=True)),
        (SmallMConfig(rows=8), None),
        (TritonGemmConfig(block_m=16, block_n=64, split=1), None),
        (None, None),
    ],
)
def test_a_weight_takes_the_digits_of_its_body_and_no_other(monkeypatch, make_weight, tile, form):
    """Where they run is stood in for: what they are handed, with which tile."""
    packed = make_weight(64, 256, 128, symmetric=False).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, "cpu", kernel="reference")
    weight = replace(weight, kernel="w4a16")
    monkeypatch.setattr(w4a16, "_chosen_tile", lambda *_, made: tile if made else None)
    handed = []
    monkeypatch.setattr(w4a16, "_linear_limbs", lambda *given: handed.append(given))
    assert ops.limb_form(weight, 3) == form
    assert ops.limb_form(weight, 5) is None
    x = torch.zeros(3, 256, dtype=torch.float16)
    for asked in (LimbForm(bits=4, with_sums=True), LimbForm(bits=4)):
        limbs = ops.to_limbs(x, asked, kernel="reference")
        if asked == form:
            ops.linear_limbs(limbs, weight)
            assert handed == [(limbs, weight, None, tile)]
        else:
            with pytest.raises(KernelError, match="linear_limbs limbs: expected"):
                ops.linear_limbs(limbs, weight)


@pytest.mark.parametrize(
    "tile", [SmallMConfig(rows=8), TritonGemmConfig(block_m=16, block_n=64, split=1)]
)
def test_parts_are_left_only_where_the_ring_takes_the_product(monkeypatch, make_weight, tile):
    """A table may say that another body is faster on this GPU."""
    cpu = torch.device("cpu")
    packed = make_weight(256, 512, 128).to("cpu")
    weight = ops.prepare_weight(packed, torch.float16, cpu, kernel="reference")
    monkeypatch.setattr(w4a16, "_chosen_tile", lambda *problem: tile)
    found = w4a16._parts_tile("norm", cpu, 8, weight)
    assert isinstance(found, SmallMConfig) == isinstance(tile, SmallMConfig)
    assert w4a16._parts_tile("norm", cpu, 0, weight) is None
