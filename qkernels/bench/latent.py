"""Benchmarks of latent attention over paged entries of 576 numbers, of which 512 are the latent."""

import functools
from collections.abc import Iterator

import torch

from qkernels import ops
from qkernels.attention.cache import AttentionStep
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed, read_shape
from qkernels.gpu.device import lacks_arch
from qkernels.latent.cache import PagedLatents
from qkernels.latent.reference import latent_attention as reference
from qkernels.latent.rows import SM90_DECODE

LATENT, ENTRY, PAGE = 512, 576, 16
# shape -> (heads, keys per request, query rows per request)
LATENT_SHAPES = {
    "16x4096x1": (16, 4096, 1),
    "20x4096x1": (20, 4096, 1),
    "64x4096x1": (64, 4096, 1),
    "128x4096x1": (128, 4096, 1),
    "16x4096x4": (16, 4096, 4),
    "16x8192x1": (16, 8192, 1),
}
LATENT_M = {
    "16x4096x1": (8, 32, 128, 160),
    "20x4096x1": (8, 128),
    "64x4096x1": (8, 128),
    "128x4096x1": (8, 128),
    "16x4096x4": (32,),
    "16x8192x1": (1,),
}


def _latent_attention(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Yield cases of m requests, whose pages are scattered in a pool larger than any cache.

    A baseline is the kernel of this name.
    """
    heads, context, rows = read_shape(LATENT_SHAPES, shape)
    X = -(-context // PAGE)
    for m in ms:
        num_bytes = m * context * ENTRY * 2
        copies = copies_needed(num_bytes)
        pages = torch.randn(copies * m * X, PAGE, ENTRY, device="cuda", dtype=torch.bfloat16)
        cache = PagedLatents(pages=pages)
        tables = torch.randperm(len(pages), device="cuda").view(copies, m, X).int()
        q = torch.randn(m * rows, heads, ENTRY, device="cuda", dtype=torch.bfloat16)
        steps = [
            AttentionStep(
                block_tables_RX=table,
                query_starts_R1=(torch.arange(m + 1, device="cuda") * rows).int(),
                context_lengths_R=torch.full((m,), context, device="cuda", dtype=torch.int32),
                max_query_len=rows,
                max_context_len=context,
            )
            for table in tables
        ]
        attend = functools.partial(
            ops.latent_attention, q, cache, latent_width=LATENT, scale=ENTRY**-0.5
        )

        def calls(kernel: str | None, attend=attend, steps=steps) -> list[Call]:
            return [functools.partial(attend, step=step, kernel=kernel) for step in steps]

        lacking = lacks_arch(q.device, "sm_90")
        names = [n for n in sorted(baselines) if n != SM90_DECODE or lacking is None]
        want = reference(q.float(), cache, steps[0], latent_width=LATENT, scale=ENTRY**-0.5)
        seen = rows * context - rows * (rows - 1) // 2  # pairs of a query row and a key
        yield Case(
            op="latent_attention",
            shape=shape,
            m=m,
            num_bytes=num_bytes + 2 * m * rows * heads * (ENTRY + LATENT),
            operations=2 * m * seen * heads * (ENTRY + LATENT),
            calls=calls(None),
            want=want,
            allowed_error=1e-2,
            baselines={name: calls(name) for name in names},
        )


OPS: dict[str, BenchedOp] = {
    "latent_attention": BenchedOp(
        cases=_latent_attention,
        shapes=LATENT_SHAPES,
        default_m=LATENT_M,
        baselines=("triton", SM90_DECODE),
        dims=3,
    ),
}
