"""Latent attention in plain torch against float64, its checks, and its launch configs."""

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.latent.cache import PagedLatents
from qkernels.latent.config import (
    MAX_SPLIT_KV,
    default_latent_config,
    expanded_boundaries,
    expanded_kernels,
    latent_boundaries,
)
from qkernels.latent.expanded import expanded_rows, heads_of_group
from tests.qkernels.latent_case import latent_case

CASE = {"H": 3, "L": 24, "rope": 8, "B": 4}


@pytest.mark.parametrize(
    ("counts", "lengths"), [((1, 1), (9, 1)), ((5, 3), (5, 20)), ((1, 0, 4), (7, 3, 6))]
)
def test_rows_attend_to_their_entries(counts, lengths, assert_close):
    case = latent_case(counts, lengths, **CASE, dtype=torch.float32)
    got = ops.latent_attention(case.q_THE, case.cache, case.step, latent_width=24, scale=case.scale)
    assert_close("out", case.exact(), got, 1e-6)


@pytest.mark.parametrize("slots", [[5, -1, 0], [-1, -1, -1]])
def test_entries_are_normalized_rotated_and_written(slots):
    """A padding token is written nowhere."""
    pages = torch.full((2, 3, 6), 9.0)
    made_TE = torch.tensor([[3.0, -3, 3, -3, 1, 0], [1, 1, 1, 1, 0, 1], [2, 2, 2, -2, 0, 1]])
    half_turn = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # none at position 0, a quarter at 1
    q_THE = ops.rope_write_latents_(
        torch.tensor([1.0, 0]).expand(3, 2, 2),
        made_TE,
        torch.full((4,), 2.0),
        half_turn,
        torch.tensor([0, 0, 1]),
        PagedLatents(pages=pages),
        torch.tensor(slots),
        eps=0.0,
    )
    assert q_THE[:, 1, 4:].tolist() == [[1, 0], [1, 0], [0, 1]]
    want = torch.full((6, 6), 9.0)
    if slots[0] == 5:
        want[5] = torch.tensor([2.0, -2, 2, -2, 1, 0])
        want[0] = torch.tensor([2.0, 2, 2, -2, -1, 0])
    assert torch.equal(pages.flatten(0, 1), want)


def test_arguments_are_checked():
    case = latent_case((1,), (5,), **CASE, dtype=torch.float32)
    narrow = PagedLatents(pages=case.cache.pages[..., :16])
    with pytest.raises(KernelError, match="latent_attention pages"):
        ops.latent_attention(case.q_THE, narrow, case.step, latent_width=8, scale=1.0)
    with pytest.raises(KernelError, match="latent_width.*expected 1 to 31, found 32"):
        ops.latent_attention(case.q_THE, case.cache, case.step, latent_width=32, scale=1.0)


SIZES = {"heads": 16, "element_size": 2, "sm_count": 132, "shared_bytes": 232_448}


def test_splits_fill_gpu_with_minimum_work_per_block():
    def split(requests, keys):
        config = default_latent_config(
            num_requests=requests, max_query_len=1, max_context_len=keys, **SIZES
        )
        return config.split

    assert split(1, 300) == 1 and split(1, 1024) == 4
    assert split(1, 10**5) == MAX_SPLIT_KV and split(64, 10**5) == 4 and split(300, 10**5) == 1


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize("size", [2, 4])
def test_warm_up_launches_every_config(heads, size):
    sizes = {**SIZES, "heads": heads, "element_size": size}

    def config(requests, count, keys):
        return default_latent_config(
            num_requests=requests, max_query_len=count, max_context_len=keys, **sizes
        )

    shapes = list(latent_boundaries(max_requests=40, max_tokens=512, max_context_len=4096, **sizes))
    launched = {config(*shape) for shape in shapes}
    for requests, count in ((1, 1), (7, 1), (40, 1), (3, 2), (12, 5), (2, 200), (1, 512)):
        for keys in (512, 700, 1024, 4000, 4096):
            assert config(requests, count, keys) in launched
    assert all(requests * count <= 512 and count <= keys for requests, count, keys in shapes)


def test_key_expansion_threshold():
    """DeepSeek-V2 and V3, GLM-4.7-Flash; latents so narrow that expansion saves nothing."""
    assert expanded_rows(heads=16, latent=512, nope=128, value=128) == 42
    assert expanded_rows(heads=128, latent=512, nope=128, value=128) == 42
    assert expanded_rows(heads=20, latent=512, nope=192, value=256) == 62
    assert expanded_rows(heads=16, latent=32, nope=24, value=40) is None


@pytest.mark.parametrize(("heads", "width"), [(16, 192), (20, 256), (128, 192)])
def test_warm_up_launches_every_kernel_over_expanded_keys(heads, width):
    sizes = {"heads": heads, "width": width, "element_size": 2, "sm_count": 132}
    most = {"max_tokens": 2048, "max_context_len": 2**17}
    shapes = list(expanded_boundaries(min_rows=42, min_pairs=10**5, **most, **sizes))
    launched = {expanded_kernels(rows=count, keys=keys, **sizes) for _, count, keys in shapes}
    for rows in (42, 100, 128, 500, 1024, 2048):
        for keys in (2048, 5000, 16384, 40000, 131072):
            assert expanded_kernels(rows=rows, keys=keys, **sizes) in launched
    assert all(42 <= count <= keys for _, count, keys in shapes)


def test_expansion_head_groups_divide_heads():
    """256 MiB hold 21,845 keys and values of 16 heads of 192 numbers."""
    sizes = {"width": 192, "element_size": 2}
    assert heads_of_group(heads=16, keys=21845, **sizes) == 16
    assert heads_of_group(heads=16, keys=21846, **sizes) == 8
    assert heads_of_group(heads=20, keys=30000, **sizes) == 10
    assert heads_of_group(heads=20, keys=10**7, **sizes) == 1
