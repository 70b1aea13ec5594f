"""Benchmarks of attention over paged keys, 16-bit, 8-bit and 4-bit, with Llama-3-8B's heads."""

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional

from qkernels import ops
from qkernels.attention.cache import INT4_PAGES, AttentionStep, PagedKv
from qkernels.attention.int4.codes import decode_rows, rotate_heads
from qkernels.attention.tuned import TUNED
from qkernels.bench.measure import Baselines, BenchedOp, Call, Case, copies_needed, read_shape

# shape -> (keys per request, query rows per request)
ATTENTION_SHAPES = {
    "1024x1": (1024, 1),
    "2048x1": (2048, 1),
    "4096x1": (4096, 1),
    "32768x1": (32768, 1),
    "8192x2048": (8192, 2048),
    "4096x512": (4096, 512),
    "2048x2048": (2048, 2048),
    "512x512": (512, 512),
    "32768x128": (32768, 128),
}
ATTENTION_M = {
    "1024x1": (32, 128),
    "2048x1": (1,),
    "4096x1": (8, 32, 128),
    "32768x1": (1,),
    "8192x2048": (1,),
    "4096x512": (4,),
    "2048x2048": (1,),
    "512x512": (16,),
    "32768x128": (1,),
}
KV_WRITE_SHAPES = {
    "bf16": None,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": INT4_PAGES,
}
# suffix -> (dtype of the codes, True: one static scale for all slots, as in a checkpoint)
CODED = {
    "_int4": (INT4_PAGES, False),
    "_int8": (torch.int8, False),
    "_fp8": (torch.float8_e4m3fn, False),
    "_int8_static": (torch.int8, True),
}
KV_WRITE_M = (1, 32, 256, 4096)
QUERY_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def _paged_attention(
    shape: str, ms: tuple[int, ...], baselines: Baselines, coded: str = ""
) -> Iterator[Case]:
    """Yield cases of m requests, whose pages are scattered in a pool larger than any cache.

    `coded` is a key of CODED.
    """
    codes, static = CODED.get(coded, (None, False))
    context, rows = read_shape(ATTENTION_SHAPES, shape)
    H, J, D = QUERY_HEADS, KV_HEADS, HEAD_DIM
    X = -(-context // PAGE)
    for m in ms:
        num_bytes = m * context * J * _bytes_of_key_and_value(codes)
        copies = copies_needed(num_bytes)
        pages = copies * m * X
        k_scales = v_scales = None
        if codes == INT4_PAGES:
            k_pages, v_pages = (
                torch.randint(0, 256, (pages, PAGE, J, D // 2), device="cuda", dtype=torch.uint8)
                for _ in range(2)
            )
            k_scales, v_scales = (
                (torch.rand(pages, J, PAGE, count, device="cuda") / 5).half().transpose(1, 2)
                for count in (4, 2)
            )
        else:
            k_pages, v_pages = (
                torch.randn(pages, PAGE, J, D, device="cuda", dtype=torch.bfloat16)
                for _ in range(2)
            )
        if codes is not None and codes != INT4_PAGES:
            k_pages, v_pages = ((30 * x).to(codes) for x in (k_pages, v_pages))
            k_scales, v_scales = (
                (torch.rand(pages, J, PAGE, device="cuda") / 30).transpose(1, 2) for _ in range(2)
            )
        if static:
            k_scales, v_scales = (
                torch.tensor(1 / 30, device="cuda").expand(pages, PAGE, J) for _ in range(2)
            )
        tables = torch.randperm(pages, device="cuda").view(copies, m, X).int()
        starts = (torch.arange(m + 1, device="cuda") * rows).int()
        lengths = torch.full((m,), context, device="cuda", dtype=torch.int32)
        q = torch.randn(m * rows, H, D, device="cuda", dtype=torch.bfloat16)

        problem = {
            "num_requests": m,
            "num_kv_heads": J,
            "heads_per_kv_head": H // J,
            "head_dim": D,
            "element_size": q.element_size(),
            "max_query_len": rows,
            "max_context_len": context,
            "window": None,
        }
        cache = PagedKv(k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)
        steps = [
            AttentionStep(
                block_tables_RX=table,
                query_starts_R1=starts,
                context_lengths_R=lengths,
                max_query_len=rows,
                max_context_len=context,
            )
            for table in tables
        ]
        call = functools.partial(ops.paged_attention, q, cache, scale=HEAD_DIM**-0.5, window=None)

        def dense(pages, scales, table=tables[0], m=m):
            found = pages[table]
            if pages.dtype == INT4_PAGES:
                found = decode_rows(found, scales[table]).to(torch.bfloat16)
            elif scales is not None:
                found = found.to(torch.bfloat16) * scales[table][..., None].to(torch.bfloat16)
            return found.view(m, X * PAGE, J, D)[:, :context].transpose(1, 2)

        def attend(q, k, v, m=m, mask=None):
            mask = torch.ones(rows, context, dtype=torch.bool, device="cuda").tril(context - rows)
            return functional.scaled_dot_product_attention(
                q.view(m, rows, H, D).transpose(1, 2),
                k,
                v,
                attn_mask=None if rows == 1 else mask,
                enable_gqa=True,
            )

        k, v = dense(k_pages, k_scales), dense(v_pages, v_scales)
        # in float32 and one request at a time, because the scores of a chunk are large
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
            # torch has no pages: contiguous keys, not in the L2 if they are larger than it
            others["sdpa"] = [lambda q=q, k=k, v=v, f=attend, m=m: f(q, k, v, m)] * 2
        seen = rows * context - rows * (rows - 1) // 2  # pairs of a query and a key
        yield Case(
            op=f"paged_attention{coded}",
            shape=shape,
            m=m,
            num_bytes=num_bytes + 4 * m * rows * H * D,
            operations=4 * m * seen * H * D,
            calls=[functools.partial(call, step=step) for step in steps],
            want=want.transpose(1, 2).reshape(m * rows, H, D),
            allowed_error=1e-2,
            baselines=others,
            tuned=None if codes else (TUNED, problem),
        )


def _bytes_of_key_and_value(codes: torch.dtype | None) -> int:
    """Return the bytes of a token's key and value in one head, including scales."""
    if codes == INT4_PAGES:
        return HEAD_DIM + 12
    return 2 * (2 * HEAD_DIM if codes is None else HEAD_DIM + 4)


def _rope_write_kv(shape: str, ms: tuple[int, ...], baselines: Baselines) -> Iterator[Case]:
    """Yield cases of m tokens, each with its own slot anywhere in the pages."""
    H, J, D = QUERY_HEADS, KV_HEADS, HEAD_DIM
    codes = KV_WRITE_SHAPES[shape]
    angle = torch.rand(8192, D // 2, device="cuda") * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1)
    for m in ms:
        dtype = codes or torch.bfloat16
        num_bytes = 2 * m * (2 * H + 2 * J) * D + m * J * _bytes_of_key_and_value(codes)
        qkv = torch.randn(
            copies_needed(num_bytes), m, H + 2 * J, D, device="cuda", dtype=torch.bfloat16
        )
        P = 4 * m // PAGE + 64
        cache = PagedKv.zeros((P, PAGE, J, D), dtype, torch.device("cuda"))
        slots = torch.randperm(P * PAGE, device="cuda")[:m]
        positions = torch.randint(0, 8192, (m,), device="cuda")

        def fused(x, positions=positions, cache=cache, slots=slots):
            q, k, v = x.split([H, J, J], dim=1)
            return ops.rope_write_kv_(q, k, v, cos_sin, positions, cache, slots)

        def apart(x, positions=positions, cache=cache, slots=slots):
            q, k, v = x.split([H, J, J], dim=1)
            q, k = ops.apply_rope(q, k, cos_sin, positions)
            ops.write_kv_(k, v, cache, slots)
            return rotate_heads(q) if cache.is_4bit else q

        q = qkv[0, :, :H].double()
        cos, sin = cos_sin.double()[positions][:, None].chunk(2, dim=-1)
        first, second = q.chunk(2, dim=-1)
        want = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        if cache.is_4bit:  # a sum over pairs of channels is exact to float32
            want = rotate_heads(want.float()).double()
        yield Case(
            op="rope_write_kv",
            shape=shape,
            m=m,
            num_bytes=num_bytes,
            operations=3 * m * (H + J) * D,
            calls=[functools.partial(fused, x) for x in qkv],
            want=want,
            allowed_error=5e-3,
            baselines={"apart": [functools.partial(apart, x) for x in qkv]}
            if "apart" in baselines
            else {},
        )


OPS: dict[str, BenchedOp] = {
    "paged_attention": BenchedOp(
        cases=_paged_attention,
        shapes=ATTENTION_SHAPES,
        default_m=ATTENTION_M,
        baselines=("sdpa",),
        dims=2,
    ),
    **{
        f"paged_attention{name}": BenchedOp(
            cases=functools.partial(_paged_attention, coded=name),
            shapes=ATTENTION_SHAPES,
            default_m=ATTENTION_M,
            baselines=("sdpa",),
            dims=2,
        )
        for name in CODED
    },
    "rope_write_kv": BenchedOp(
        cases=_rope_write_kv,
        shapes=KV_WRITE_SHAPES,
        default_m=dict.fromkeys(KV_WRITE_SHAPES, KV_WRITE_M),
        baselines=("apart",),
    ),
}
