"""Latent attention for sm_90 (latent/sm90_decode.py) on a GPU, against float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from qkernels import ops
from qkernels.errors import KernelError
from qkernels.latent import sm90_decode
from qkernels.latent.sm90_decode_config import Sm90LatentConfig
from tests.qkernels.latent_case import latent_case

pytestmark = pytest.mark.hopper

# counts and lengths: decode rows; drafts; chunks that begin and go on; a request without rows
STEPS = {
    "decode": ((1,) * 7, (1, 63, 64, 65, 129, 1000, 2047)),
    "drafts": ((3, 4, 4), (3, 515, 1200)),
    "chunks": ((5, 90), (5, 333)),
    "mixed": ((1, 6, 0, 1), (193, 70, 4, 2)),
}
# heads, tokens of a page, splits; each kernel takes seconds to compile
QUICK = (
    (16, 16, None),
    (16, 64, 1),
    (20, 32, 1),
    (5, 128, 2),
    (64, 64, 8),
    (70, 16, 1),
    (128, 16, 2),
)


def attend(case, config=None, q_THE=None):
    return sm90_decode.latent_attention(
        case.q_THE if q_THE is None else q_THE,
        case.cache,
        case.step,
        latent_width=case.latent,
        scale=case.scale,
        config=config,
    )


@pytest.mark.parametrize(
    ("H", "B", "split"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.exhaustive)
        for each in itertools.product((16, 20, 5, 64, 70, 128), (16, 32, 64, 128), (None, 1, 2, 8))
    ],
)
@pytest.mark.parametrize("name", STEPS)
def test_rows_attend_to_their_entries(
    name, H, B, split, half, device, assert_close, tolerance, poison
):
    """Pages in no order; unused ones, and the rest of last ones, hold NaN."""
    counts, lengths = STEPS[name]
    case = latent_case(counts, lengths, H=H, L=512, rope=64, B=B, dtype=half, device=device)
    config = None
    if split is not None:
        heads = min(64, 1 << (H - 1).bit_length())
        rows = max(16 // heads, min(64 // heads, 1 << (max(counts) - 1).bit_length()))
        config = Sm90LatentConfig(block_heads=heads, block_q=rows, split=split)
    assert_close("out", case.exact(), attend(case, config), tolerance(half))


@pytest.mark.parametrize(("L", "rope"), [(128, 8), (128, 64), (256, 32)])
def test_other_widths(L, rope, half, device, assert_close, tolerance, poison):  # noqa: N803
    sizes = {"H": 12, "L": L, "rope": rope, "B": 16}
    case = latent_case((1, 2), (100, 300), **sizes, dtype=half, device=device)
    assert_close("out", case.exact(), attend(case), tolerance(half))


@pytest.mark.parametrize("H", [16, 20, 128])
def test_repeated_runs_are_bitwise_equal(H, device):  # noqa: N803
    """Sums have a fixed order, so a difference is a race between warps."""
    lengths = tuple(500 + 13 * i for i in range(150))
    sizes = {"H": H, "L": 512, "rope": 64, "B": 16}
    case = latent_case((1,) * 150, lengths, **sizes, dtype=torch.bfloat16, device=device)
    want = attend(case)
    for _ in range(30):
        assert torch.equal(attend(case), want)


def test_captured_graph_reads_new_lengths_and_pages(device, assert_close, tolerance):
    """The config is that of the largest context; requests have less, and one has nothing."""
    sizes = {"H": 16, "L": 512, "rope": 64, "B": 16, "dtype": torch.bfloat16, "device": device}
    long = latent_case((1, 1, 1), (1500, 1500, 1500), **sizes)
    case = latent_case((1, 1, 1), (130, 900, 17), **sizes)
    attend(long)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(long)
    graph.replay()
    assert_close("long", long.exact(), out, tolerance(torch.bfloat16))
    long.step.block_tables_RX[:, : case.step.block_tables_RX.shape[1]] = case.step.block_tables_RX
    long.step.context_lengths_R.copy_(case.step.context_lengths_R)
    long.q_THE.copy_(case.q_THE)
    long.cache.pages.fill_(float("nan"))
    long.cache.pages[: len(case.cache.pages)] = case.cache.pages
    graph.replay()
    assert_close("short", case.exact(), out, tolerance(torch.bfloat16))


def test_padding_rows_and_unaligned_queries(device, assert_close, tolerance):
    sizes = {"H": 16, "L": 512, "rope": 64, "B": 16, "dtype": torch.bfloat16, "device": device}
    case = latent_case((1, 1), (700, 9), **sizes)
    flat = torch.full((3 * 16 * 576 + 1,), float("nan"), dtype=torch.bfloat16, device=device)
    q_THE = flat[1:].view(3, 16, 576)
    q_THE[:2] = case.q_THE
    got = attend(case, q_THE=q_THE)
    assert_close("out", case.exact(), got[:2], tolerance(torch.bfloat16))


def test_requested_by_name_and_refuses_8_bit_pages(device, assert_close, tolerance):
    sizes = {"H": 16, "L": 512, "rope": 64, "B": 16, "dtype": torch.bfloat16, "device": device}
    case = latent_case((1, 1), (700, 9), **sizes)
    asked = {"latent_width": 512, "scale": case.scale, "kernel": "sm90_decode"}
    got = ops.latent_attention(case.q_THE, case.cache, case.step, **asked)
    assert_close("out", case.exact(), got, tolerance(torch.bfloat16))
    assert torch.equal(got, attend(case))
    coded = latent_case((1, 1), (700, 9), **sizes, codes=torch.int8)
    with pytest.raises(KernelError, match="takes pages of torch.bfloat16, not torch.int8"):
        ops.latent_attention(coded.q_THE, coded.cache, coded.step, **asked)
    ops.latent_attention(coded.q_THE, coded.cache, coded.step, **asked | {"kernel": None})


def test_no_pages_and_no_rows(device):
    sizes = {"H": 16, "L": 512, "rope": 64, "B": 16, "dtype": torch.bfloat16, "device": device}
    case = latent_case((1,), (40,), **sizes)
    empty = replace(case.cache, pages=case.cache.pages[:0])
    settings = {"latent_width": 512, "scale": 1.0}
    got = sm90_decode.latent_attention(case.q_THE, empty, case.step, **settings)
    assert not got.any()
    assert sm90_decode.latent_attention(case.q_THE[:0], empty, case.step, **settings).numel() == 0
