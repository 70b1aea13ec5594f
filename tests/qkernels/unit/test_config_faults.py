"""Limits of configs: their fields, the problem's sizes, the workspace, the GPU."""

import dataclasses

import pytest

from qkernels.attention import config as attention_config
from qkernels.attention.config import AttentionConfig, default_attention_config
from qkernels.gpu.workspace import WORKSPACE_COUNTERS, WORKSPACE_FLOATS
from qkernels.operands.limbs import LIMBS_MAX_ROWS
from qkernels.w8a8 import config as w8a8_config
from qkernels.w8a8.config import (
    W8A8Sm90Config,
    W8A8TritonConfig,
    default_sm90_config,
    default_w8a8_triton_config,
)
from qkernels.w8a8.tuned import TUNED as W8A8
from qkernels.wna16 import (
    sm90_gemv_imma_config,
    sm90_large_m_config,
    sm90_small_m_config,
    triton_config,
)
from qkernels.wna16.sm90_gemv_imma_config import GemvImmaConfig, default_gemv_config
from qkernels.wna16.sm90_large_m_config import LargeMConfig, default_large_m_config
from qkernels.wna16.sm90_small_m_config import SmallMConfig, default_small_m_config
from qkernels.wna16.triton_config import TritonGemmConfig, default_triton_config
from qkernels.wna16.tuned import TUNED as WNA16


def test_faults_of_w8a8_and_attention_configs():
    fits = W8A8TritonConfig(block_m=16, block_n=64, block_k=256, split=4)
    problem = {"M": 16, "N": 4096, "K": 14336}
    assert w8a8_config.w8a8_triton_config_fault(fits, **problem) is None
    for change in ({"block_n": 32}, {"weight_is_a": False}, {"block_k": 96}, {"split": 0}):
        tile = dataclasses.replace(fits, **change)
        assert w8a8_config.w8a8_triton_config_fault(tile, **problem) is not None, change
    narrow = dataclasses.replace(fits, block_k=64)
    assert w8a8_config.w8a8_triton_config_fault(narrow, **problem) is None
    assert "128" in w8a8_config.w8a8_triton_config_fault(narrow, **problem, integers=False)
    fits = AttentionConfig(block_m=16, block_q=4, keys=64, split=8, warps=4, stages=2)
    assert attention_config.attention_config_fault(fits, heads_per_kv_head=3) is None
    for change in ({"block_q": 8}, {"keys": 48}, {"split": 3}, {"warps": 3}, {"stages": 0}):
        tile = dataclasses.replace(fits, **change)
        assert attention_config.attention_config_fault(tile, heads_per_kv_head=3) is not None, (
            change
        )


@pytest.mark.parametrize("sm_count", [4, 46, 132])
@pytest.mark.parametrize("M", [1, 2, 3, 5, 8, 16, 17, 64, 128, 256, 1024, 4096])
def test_default_configs_are_valid(M, sm_count):
    for N in (8, 1000, 6144, 28672, 151936):
        for K in (128, 4096, 14336):
            tile = default_triton_config(M, N, K, 128, sm_count)
            problem = {"M": M, "N": N, "K": K}
            if tile is not None:
                fault = triton_config.triton_config_fault(tile, group=128, bits=4, **problem)
                assert fault is None, f"{problem}: {fault}"
            for bits in (4, 8):
                tile = default_gemv_config(M, N, K, 128, bits, sm_count)
                assert (tile is not None) == (M <= LIMBS_MAX_ROWS)
                if tile is not None:
                    whole = problem | {"group": 128, "bits": bits}
                    assert WNA16.fault(tile, whole) is None, whole
                tile = default_small_m_config(M, N, K, 128, bits, sm_count)
                assert (tile is not None) == (M <= 64 and bits == 4)
                if tile is not None:
                    whole = problem | {"group": 128, "bits": bits}
                    assert WNA16.fault(tile, whole) is None, whole
                tile = default_large_m_config(M, N, K, 128, bits, sm_count)
                if tile is not None:
                    whole = problem | {"group": 128, "bits": bits}
                    assert WNA16.fault(tile, whole) is None, whole
            tile = default_w8a8_triton_config(M, N, K, sm_count)
            assert w8a8_config.w8a8_triton_config_fault(tile, **problem) is None, problem
            for kind in ("int", "float"):
                tile = default_sm90_config(M, N, K, sm_count, kind)
                whole = problem | {"integers": kind == "int"}
                assert W8A8.fault(tile, whole) is None, whole
    for heads in (1, 3, 4, 16):
        problem = {
            "num_kv_heads": 8,
            "heads_per_kv_head": heads,
            "head_dim": 128,
            "element_size": 2,
            "window": None,
            "num_requests": 1 + M // 256,
            "max_query_len": M,
            "max_context_len": 8192,
        }
        tile = default_attention_config(**problem, sm_count=sm_count)
        assert attention_config.attention_config_fault(tile, **problem) is None, problem


def test_split_and_wide_block_config_limits():
    tile = TritonGemmConfig(block_m=16, block_n=64, split=2)
    problem = {"M": 1, "N": 4096, "K": 4096, "group": 128, "bits": 4}

    def fault(**changes):
        fields = {f: changes.pop(f) for f in ("split", "block_n") if f in changes}
        changed = dataclasses.replace(tile, **fields)
        return triton_config.triton_config_fault(changed, **problem | changes)

    assert fault() is None
    rows = WORKSPACE_FLOATS // (2 * 4096)
    assert fault(M=rows) is None and "workspace" in fault(M=rows + 1)
    assert fault(M=2 * rows, split=1) is None
    many = WORKSPACE_COUNTERS * 64
    assert fault(N=many) is None and "counters" in fault(N=many + 64)
    assert fault(N=many + 64, split=1) is None
    assert fault(N=128, block_n=128) is None and "block_n" in fault(N=64, block_n=128)


def test_gemv_config_limits():
    problem = {"M": 4, "N": 4096, "K": 4096, "group": 128, "bits": 4}

    def fault(changed=None, **changes):
        tile = dataclasses.replace(GemvImmaConfig(), **changed or {})
        return sm90_gemv_imma_config.gemv_config_fault(tile, **problem | changes)

    assert fault() is None and fault(group=384) is None
    for change in ({"M": 5}, {"bits": 3}, {"group": 64}):
        assert fault(**change) is not None, change
    for change in (
        *({"block_n": 48}, {"warps": 3}, {"warps": 32}),
        *({"steps_in_flight": 0}, {"steps_in_flight": 9}),
    ):
        assert fault(change) is not None, change


def test_large_m_config_limits():
    problem = {"M": 128, "N": 4096, "K": 4096, "group": 128, "bits": 4}
    fits = LargeMConfig(blocks=132, num_consumers=2, block_m=128, split=4)

    def fault(changed=None, **changes):
        tile = dataclasses.replace(fits, **changed or {})
        return sm90_large_m_config.large_m_config_fault(tile, **problem | changes)

    assert fault() is None and fault(group=384, K=3840) is None
    # 32 tiles in 4 parts that wait for each other
    assert fault({"blocks": 128}) is None and "resident" in fault({"blocks": 127})
    assert "resident" in fault(M=129) and fault({"split": 1}, M=129) is None
    assert "resident" in fault(K=256) and fault({"split": 2}, K=256) is None
    narrow = {"split": 1, "block_m": 64}
    assert fault(narrow, M=64) is None and "64 rows" in fault(narrow, M=65)
    assert fault({"split": 1, "block_m": 256, "tail_split": True}, M=4096) is None
    assert fault({"bits": 8}, bits=8) is None
    for change in ({"bits": 8}, {"group": 64}):
        assert fault(**change) is not None, change
    assert fault({"bits": 2}, bits=2) is not None
    for change in (
        *(
            {"bits": 8},
            {"block_m": 64},
            {"block_m": 32},
            {"block_m": 0},
            {"num_consumers": 1},
            {"num_consumers": 4},
        ),
        *({"num_consumers": 3, "block_m": 256}, {"split": 3}, {"split": 0}, {"split": -4}),
        *({"split": 1, "blocks": 0}, {"split": 1, "blocks": -5}, {"split": 1, "tail_split": True}),
        {"block_m": 256, "split": 2, "tail_split": True},
    ):
        assert fault(change) is not None, change
    # the sums of all parts have their place: a GPU of that many SMs would write beyond it
    assert fault({"blocks": 2**20}, N=8192) is None
    assert "workspace" in fault({"blocks": 2**20}, N=8192 + 128)


def test_sm90_w8a8_config_limits():
    problem = {"M": 128, "N": 4096, "K": 14336, "integers": True}
    fits = W8A8Sm90Config(num_consumers=1, block_b=128, split=2, reduce_scatter=True)

    def fault(changed=None, **changes):
        tile = dataclasses.replace(fits, **changed or {})
        return w8a8_config.w8a8_sm90_config_fault(tile, **problem | changes)

    assert fault() is None and fault(K=256) is None
    assert "step" in fault(K=128), "a part without a step"
    tall = {
        "split": 1,
        "reduce_scatter": False,
        "weight_is_a": False,
        "consumer_rows": 128,
        "store_stages": 1,
        "num_consumers": 2,
    }
    assert fault(tall) is None
    assert fault({"idle_rows": 32}) is None and fault({"idle_rows": 16}, N=4128) is None
    for change in (
        *(
            {"num_consumers": 0},
            {"num_consumers": 4},
            {"consumer_rows": 32},
            {"consumer_rows": 128},
            {"consumer_rows": 2**40},
        ),
        *({"block_b": 8}, {"block_b": 48}, {"block_b": 512}),
        *({"split": 3}, {"split": 0}, {"split": -2}, {"split": 8}, {"split": 1}),
        *({"idle_rows": 8}, {"idle_rows": 48}, {"idle_rows": -16}, {"idle_rows": 64}),
        # outputs that 48 do not divide
        {"idle_rows": 16},
        tall | {"consumer_rows": 64, "idle_rows": 32},
        tall | {"idle_rows": 32},
        # shares of 8 columns
        {"block_b": 16},
        # a box of the weight has 64 rows
        {"weight_is_a": False, "block_b": 32, "split": 1, "reduce_scatter": False},
        *({"store_stages": 0}, {"store_stages": 3}, {"blocks_per_sm": 0}, {"blocks_per_sm": 3}),
        *({"max_stages": 2}, {"max_stages": -1}, {"max_prefetch_stages": 0}),
        *({"group_a": 0}, {"group_a": 2**31}, {"promotion_steps": 1}),
        # three warpgroups of each of two blocks; sums that a thread has no registers for
        {"num_consumers": 3, "blocks_per_sm": 2, "block_b": 64},
        tall | {"block_b": 256},
    ):
        assert fault(change) is not None, change
    # float8 sums are emptied at least every 128 inputs, of few rows every 256
    for M, allowed in ((64, (1, 2)), (65, (1,))):
        for steps in range(4):
            change = {"promotion_steps": steps, "block_b": 64}
            found = fault(change, M=M, integers=False)
            assert (found is None) == (steps in allowed), (M, steps)
    assert "registers" in fault({"promotion_steps": 1, "block_b": 256}, integers=False)
    # the sums of all parts have their place, whether they are scattered or not
    rows = WORKSPACE_FLOATS // (2 * 4096)
    for change in ({}, {"reduce_scatter": False}):
        assert fault(change, M=rows) is None and "workspace" in fault(change, M=rows + 1)
    assert fault({"split": 1, "reduce_scatter": False}, M=2 * rows) is None


def test_small_m_config_limits():
    problem = {"M": 8, "N": 4096, "K": 4096, "group": 128, "bits": 4}

    def fault(changed=None, **changes):
        tile = dataclasses.replace(SmallMConfig(block_m=8), **changed or {})
        return sm90_small_m_config.small_m_config_fault(tile, **problem | changes)

    assert fault() is None and fault(group=384) is None and fault(K=2**20) is None
    assert fault({"block_m": 64}, M=64) is None and fault({"split": 32}) is None
    for change in ({"M": 9}, {"bits": 8}, {"group": 64}):
        assert fault(**change) is not None, change
    for change in ({"block_m": 4}, {"block_m": 128}, {"split": 0}, {"stages": 0}, {"stages": 9}):
        assert fault(change) is not None, change
    assert "workspace" in fault({"split": 33}), "a part without a step"
    # the sums of two parts
    N = WORKSPACE_FLOATS // (2 * 128 * 8) * 128
    assert fault({"split": 2}, N=N) is None and fault({"split": 2}, N=N + 128) is not None
    assert WORKSPACE_FLOATS // (2 * 128 * 8) * 2 <= WORKSPACE_COUNTERS, "two for each tile"
    assert fault(N=2 * N) is None, "a tile in one part has none"


def test_config_must_be_valid_for_whole_bucket():
    """Measured at 33 rows, it will be found at 64."""
    N = WORKSPACE_FLOATS // (2 * 40) // 64 * 64
    tile = TritonGemmConfig(block_m=64, block_n=64, split=2)
    problem = {"M": 33, "N": N, "K": 4096, "group": 128, "bits": 4}
    assert triton_config.triton_config_fault(tile, **problem) is None
    assert "workspace" in WNA16.fault(tile, problem)
