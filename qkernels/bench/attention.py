"""Attention over paged keys. Heads are Llama-3-8B's."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed

# keys of each request, query rows of each request
ATTENTION_SHAPES = {
    "1024x1": (1024, 1),
    "2048x1": (2048, 1),
    "4096x1": (4096, 1),
    "32768x1": (32768, 1),
    "8192x2048": (8192, 2048),
    "4096x512": (4096, 512),
}
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def _paged_attention(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """m requests; their pages lie anywhere in a pool that no cache holds."""
    context, rows = ATTENTION_SHAPES[shape]
    H, J, D = QUERY_HEADS, KV_HEADS, HEAD_DIM
    X = context // PAGE
    for m in ms:
        copies = copies_needed(4 * m * context * J * D)
        pages = copies * m * X
        k_pages, v_pages = (
            torch.randn(pages, PAGE, J, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)
        )
        tables = torch.randperm(pages, device="cuda").view(copies, m, X).int()
        starts = (torch.arange(m + 1, device="cuda") * rows).int()
        lengths = torch.full((m,), context, device="cuda", dtype=torch.int32)
        q = torch.randn(m * rows, H, D, device="cuda", dtype=torch.bfloat16)

        def call(table, q=q, k=k_pages, v=v_pages, starts=starts, lengths=lengths):
            return ops.paged_attention(
                q,
                k,
                v,
                table,
                starts,
                lengths,
                scale=HEAD_DIM**-0.5,
                window=None,
                max_query_len=rows,
                max_context_len=context,
            )

        def dense(pages, table=tables[0], m=m):
            return pages[table].view(m, context, J, D).transpose(1, 2)

        def attend(q, k, v, m=m, mask=None):
            mask = torch.ones(rows, context, dtype=torch.bool, device="cuda").tril(context - rows)
            return functional.scaled_dot_product_attention(
                q.view(m, rows, H, D).transpose(1, 2),
                k,
                v,
                attn_mask=None if rows == 1 else mask,
                enable_gqa=True,
            )

        k, v = dense(k_pages), dense(v_pages)
        # float32 and one request at a time: the scores of a chunk are large
        want = torch.cat(
            [
                attend(
                    q[i * rows : (i + 1) * rows].float(), k[i, None].float(), v[i, None].float(), 1
                )
                for i in range(m)
            ]
        )
        others: dict[str, list[Call]] = {}
        if "sdpa" in baselines and rows == 1:
            # contiguous keys, no pages: what torch has; cold where the keys exceed the cache
            others["sdpa"] = [lambda q=q, k=k, v=v, f=attend, m=m: f(q, k, v, m)] * 2
        seen = rows * context - rows * (rows - 1) // 2  # pairs of a query and a key
        yield Case(
            op="paged_attention",
            shape=shape,
            m=m,
            num_bytes=4 * m * context * J * D + 4 * m * rows * H * D,
            operations=4 * m * seen * H * D,
            calls=[lambda t=t, f=call: f(t) for t in tables],
            want=want.transpose(1, 2).reshape(m * rows, H, D),
            allowed_error=1e-2,
            baselines=others,
        )


OPS: dict[str, BenchedOp] = {
    "paged_attention": BenchedOp(
        cases=_paged_attention,
        shapes=ATTENTION_SHAPES,
        default_m={
            "1024x1": (32, 128),
            "2048x1": (1,),
            "4096x1": (8, 32, 128),
            "32768x1": (1,),
            "8192x2048": (1,),
            "4096x512": (4,),
        },
        baselines=("sdpa",),
    ),
}
