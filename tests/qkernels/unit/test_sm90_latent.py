"""Latent attention for sm_90 without a GPU: its source in plain torch against float64, its configs,
and the order of shared memory that its views assume."""

import itertools
import json
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import triton

from qkernels.latent import sm90_decode
from qkernels.latent.sm90_decode_config import (
    Sm90LatentConfig,
    sm90_latent_boundaries,
    sm90_latent_config,
)
from qkernels.operations import explain
from tests.qkernels import plain_gluon
from tests.qkernels.latent_case import latent_case

# counts and lengths: decode rows; chunks that begin and go on; both, and a request without rows
STEPS = {
    "decode": ((1, 1, 1), (130, 1, 48)),
    "chunks": ((2, 5), (2, 80)),
    "mixed": ((1, 3, 0, 1), (65, 48, 4, 2)),
}
# H, L, rope, B and columns of a tile; boxes of a page or of half of it
SIZES = {
    "16 heads": (16, 128, 64, 16, 16),
    "20 heads": (20, 128, 32, 32, 32),
    "rows of 5 heads": (5, 128, 16, 64, 64),
    "70 heads": (70, 128, 64, 128, 64),
}
QUICK = (
    ("decode", "16 heads", 1),
    ("decode", "20 heads", 4),
    ("chunks", "16 heads", 1),
    ("chunks", "rows of 5 heads", 1),
    ("mixed", "rows of 5 heads", 2),
    ("decode", "70 heads", 1),
)


def merged(partials_THSL, sums_2THS, starts, out_THL, limbs):
    """merge_splits in torch: splits that have seen no key are not written."""
    largest_THS, weights_THS = sums_2THS
    shift_THS = (largest_THS - largest_THS.amax(-1, keepdim=True)).exp2()
    shift_THS = torch.where(weights_THS > 0, shift_THS, 0.0)
    values_THSL = torch.where(weights_THS[..., None] > 0, partials_THSL, 0.0)
    total_TH1 = (weights_THS * shift_THS).sum(-1, keepdim=True)
    out_THL.copy_((values_THSL * shift_THS[..., None]).sum(2) / total_TH1.clamp(min=1e-30))
    return out_THL


@pytest.fixture
def run(monkeypatch):
    """Run the kernel's source on a CPU."""
    monkeypatch.setattr(sm90_decode, "launch", plain_gluon.launch)
    monkeypatch.setattr(sm90_decode, "merge_splits", merged)
    monkeypatch.setattr(
        sm90_decode, "describe", lambda make, x, block: plain_gluon.Descriptor(x, block)
    )
    monkeypatch.setattr(sm90_decode, "pdl_options", lambda x, rows: {"PDL": True})

    def run(case, config):
        settings = {"latent_width": case.latent, "scale": case.scale, "config": config}
        return sm90_decode.latent_attention(case.q_THE, case.cache, case.step, **settings)

    return run


@pytest.mark.parametrize(
    ("name", "of_sizes", "split"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.exhaustive)
        for each in itertools.product(STEPS, SIZES, (1, 2, 4))
    ],
)
def test_rows_attend_to_their_entries(name, of_sizes, split, run, assert_close, tolerance, poison):
    (counts, lengths), (H, L, rope, B, columns) = STEPS[name], SIZES[of_sizes]
    sizes = {"H": H, "L": L, "rope": rope, "B": B}
    case = latent_case(counts, lengths, **sizes, dtype=torch.bfloat16)
    heads = min(64, 1 << (H - 1).bit_length())
    config = Sm90LatentConfig(block_heads=heads, block_q=columns // heads, split=split)
    assert_close("out", case.exact(), run(case, config), tolerance(torch.bfloat16))


def test_padding_rows_after_the_last_request_change_nothing(run, assert_close, tolerance):
    """As in a CUDA graph, whose step has more rows than the requests."""
    case = latent_case((1, 1), (70, 9), H=3, L=128, rope=8, B=16, dtype=torch.float16)
    want = case.exact()
    object.__setattr__(case, "q_THE", torch.cat([case.q_THE, case.q_THE * float("nan")]))
    got = run(case, Sm90LatentConfig(block_heads=4, block_q=4, split=1))
    assert_close("out", want, got[:2], tolerance(torch.float16))


# In a process of its own, because a builder leaves a warning about leaks at the end.
PRINT_BASES = """
import json
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon import language as gl
context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
for shape in ([64, 512], [1, 16, 64], [1, 32, 64], [1, 64, 64]):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(shape))
    print(json.dumps(builder.to_linear_layout(layout._to_ir(builder), shape).offset_bases))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="earlier versions cannot express a layout of shared memory",
)
def test_tma_boxes_match_swizzled_tile():
    """Triton's own layouts: box [chunk, keys] of a tile is where TMA writes these keys."""
    command = [sys.executable, "-c", PRINT_BASES]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    tile, *boxes = (order(json.loads(line)) for line in lines)
    for rows, box in zip((16, 32, 64), boxes, strict=True):
        moved = [
            box + torch.tensor([keys * rows, chunk * 64])
            for chunk in range(8)
            for keys in range(64 // rows)
        ]
        assert torch.equal(torch.cat(moved), tile)
    # what plain_gluon.py assumes, apart from the exchange of 16 bytes within rows of 128 bytes
    plain = plain_gluon.places_of([64, 512])[tile[:, 0], tile[:, 1]]
    assert torch.equal(plain // 64, torch.arange(64 * 512) // 64)


def order(bases):
    """Row and column of each element, in the order of memory."""
    found = torch.zeros(1, 2, dtype=torch.int64)
    for basis in bases:
        found = torch.cat([found, found ^ torch.tensor(basis[-2:])])
    return found


H200 = {"sm_count": 132}


def test_tiles_hold_few_heads_or_several_rows():
    def config(heads, rows):
        found = sm90_latent_config(
            num_requests=128, heads=heads, max_query_len=rows, max_context_len=4096, **H200
        )
        return found.block_heads, found.block_q

    assert config(16, 1) == (16, 1) and config(20, 1) == (32, 1) and config(128, 1) == (64, 1)
    assert config(16, 3) == (16, 4) and config(16, 500) == (16, 4) and config(4, 1) == (4, 4)


def test_splits_fill_the_sms_once():
    def split(requests, keys):
        found = sm90_latent_config(
            num_requests=requests, heads=16, max_query_len=1, max_context_len=keys, **H200
        )
        return found.split

    assert split(1, 200) == 1 and split(1, 1024) == 8 and split(1, 10**5) == 32
    assert split(8, 4096) == 16 and split(64, 4096) == 2 and split(128, 4096) == 1
    assert split(140, 4096) > 1  # otherwise 8 tiles would make a second wave
    assert split(264, 4096) == 1


@pytest.mark.parametrize("heads", [3, 16, 128])
def test_warm_up_launches_every_config(heads):
    def config(requests, count, keys):
        return sm90_latent_config(
            num_requests=requests, heads=heads, max_query_len=count, max_context_len=keys, **H200
        )

    most = {"max_requests": 40, "max_tokens": 512, "max_context_len": 4096}
    shapes = list(sm90_latent_boundaries(heads=heads, **H200, **most))
    launched = {config(*shape) for shape in shapes}
    for requests, count in ((1, 1), (7, 1), (40, 1), (3, 2), (12, 5), (2, 200), (1, 512)):
        for keys in (512, 700, 1024, 4000, 4096):
            assert config(requests, count, keys) in launched
    assert all(requests * count <= 512 and count <= keys for requests, count, keys in shapes)


def test_runs_for_supported_problems():
    problem = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "head_dim": 576,
        "latent_width": 512,
        "page_size": 16,
        "pages_dtype": torch.bfloat16,
    }

    def taken(**other):
        (found,) = (each.name for each in explain("latent_attention", **problem | other) if each[1])
        return found

    def refused(**other):
        asked = problem | {"requested": "sm90_decode"} | other
        return explain("latent_attention", **asked)[0].reason

    assert taken() == "sm90_decode"
    assert taken(requested="sm90_decode") == "sm90_decode"
    assert taken(requested="-sm90_decode") == "triton"
    assert "int8" in refused(pages_dtype=torch.int8)
    assert "not 8" in refused(page_size=8)
    assert "not 500 and 76" in refused(latent_width=500)
    assert "float32" in refused(dtype=torch.float32, pages_dtype=torch.float32)
