"""In how many parts the ring cuts a product, and who adds them, as measured."""

import itertools

import pytest

from qkernels.wna16 import sm90_small_m_config
from qkernels.wna16.configs import default_config
from qkernels.wna16.sm90_large_m_config import LargeMConfig
from qkernels.wna16.sm90_small_m_config import SmallMConfig, default_small_m_config, split_k_config
from qkernels.wna16.triton_config import TritonGemmConfig


def test_rings_cut_what_would_leave_sms_idle():
    """(split, stages, alone, early) as measured."""
    shapes = {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "short": (8192, 1024),
    }
    chosen = {
        name: {
            tile.rows: (tile.split, tile.stages, tile.alone, tile.early)
            for M in (8, 16, 32, 64)
            if (tile := default_small_m_config(M, *shape, 128, 4, 132))
        }
        for name, shape in shapes.items()
    }
    assert chosen == {
        "qkv": {
            8: (5, 3, False, False),
            16: (5, 3, False, False),
            32: (4, 3, False, False),
            64: (2, 4, True, True),
        },
        "o": {
            8: (7, 3, False, False),
            16: (7, 3, False, False),
            32: (7, 3, False, False),
            64: (4, 4, True, False),
        },
        "gate_up": {
            8: (1, 4, False, True),
            16: (1, 4, False, True),
            32: (1, 4, False, True),
            64: (1, 3, False, True),
        },
        "down": {
            8: (8, 4, False, True),
            16: (8, 3, False, True),
            32: (8, 3, False, True),
            64: (4, 4, True, True),
        },
        "short": {
            8: (3, 3, False, False),
            16: (3, 3, False, False),
            32: (3, 3, False, False),
            64: (1, 4, True, True),
        },
    }
    for M, kind in ((8, SmallMConfig), (64, SmallMConfig), (65, LargeMConfig)):
        tile = default_config(M, 4096, 14336, 128, 4, 132, gluon=True)
        assert isinstance(tile, kind)
        tile = default_config(M, 4096, 14336, 128, 4, 132, gluon=False)
        assert isinstance(tile, TritonGemmConfig)


def test_parts_are_left_to_the_next_operation_where_that_was_faster():
    """Parts for 8, 16, 32 and 64 rows, as measured; None: the last part adds."""

    def chosen(consumer, N, K):
        tiles = [split_k_config(consumer, M, N, K, 128, 4, 132) for M in (8, 16, 32, 64)]
        return [tile and tile.split for tile in tiles]

    assert chosen("rope", 6144, 4096) == [5, 5, 5, 2]
    assert chosen("norm", 4096, 4096) == [None, None, 7, 3], "few blocks read much"
    assert chosen("norm", 4096, 14336) == [None, None, 7, None], "64 rows in 4 parts fill the GPU"
    assert chosen("norm", 8192, 28672) == [None] * 4
    assert chosen("rope", 1152, 896) == [7, 7, 7, 7]
    assert chosen("norm", 896, 4864) == [13, 13, 13, 13]
    assert chosen("norm", 2048, 2048) == [6, 6, 6, 6]


@pytest.mark.parametrize("sm_count", [16, 78, 114, 132])
def test_parts_are_for_few_rows_of_4_bits_in_groups_of_128_n(sm_count):
    for N, K, consumer in itertools.product(
        (8, 896, 1152, 4096, 16384, 128256), (128, 256, 896, 4096, 28672), ("norm", "rope")
    ):
        for M in (5, 8, 17, 64):
            tile = split_k_config(consumer, M, N, K, 128, 4, sm_count)
            if tile is not None:
                assert tile.split > 1 and tile.rows >= M and tile.fits(N, K), (N, K, M)
                problem = {"M": M, "N": N, "K": K, "group": 128, "bits": 4}
                assert sm90_small_m_config.small_m_config_fault(tile, **problem) is None
        # of up to 4 rows the reader makes limbs; beyond 64 there is another body
        for M, group, bits in ((1, 128, 4), (4, 128, 4), (65, 128, 4), (8, 64, 4), (8, 128, 8)):
            assert split_k_config(consumer, M, N, K, group, bits, sm_count) is None
