"""Selection of blocks of keys by an indexer, and attention over the selected blocks.

Each function checks its arguments, then runs a kernel.

T: rows of a step. R: requests. H: query heads. J: KV heads, each with a head of the indexer. D:
numbers of the indexer's keys. P: pages. B: tokens of a page. X: pages of a block table. Y: blocks
of keys. S: selected blocks.
"""

from dataclasses import dataclass, replace

import torch

from qkernels import dispatch
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.ops import paged_attention
from qkernels.attention.rows import BLOCK_SCORES
from qkernels.attention.selected.order import rows_and_positions, rows_of_block, top_indices
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedBlocks:
    """Pages of the blocks that each row sees, by position; each KV head has its own."""

    tables_JTX: torch.Tensor  # int32; pages beyond a row's count are 0
    # int32: keys in these pages that a row sees; 0 for rows that belong to no request
    counts_JT: torch.Tensor


def select_blocks(
    q_TJD: torch.Tensor,
    keys_PBD: torch.Tensor,
    step: AttentionStep,
    *,
    block_size: int,
    most: int,
    local: int,
    kernel: str | None = None,
) -> SelectedBlocks:
    """Return the `most` blocks with the highest scores for each row and KV head.

    A block's score is the largest product q k of its keys that a row sees. The row's own block and
    the `local` - 1 blocks before it are always selected. A block is `block_size` positions, a
    multiple of the page size. `kernel` names a row of block_scores, or excludes rows with a
    leading minus.
    """
    op = "select_blocks"
    check_float(f"{op} q", q_TJD)
    T, J, D = expect_ndim(f"{op} q", q_TJD, 3)
    check_tensor(f"{op} keys", keys_PBD, (None, None, D), (q_TJD.dtype,), q_TJD)
    if not keys_PBD.is_contiguous():
        raise KernelError(
            f"{op} keys",
            f"expected contiguous, found {keys_PBD.stride()}",
            "make it contiguous",
        )
    page_size, K = keys_PBD.shape[1], step.max_context_len
    if block_size % page_size:
        raise KernelError(
            f"{op} block_size",
            f"expected a multiple of the page size {page_size}, found {block_size}",
            "choose such a size",
        )
    if step.block_tables_RX.shape[1] * page_size < K:
        raise KernelError(
            f"{op} max_context_len",
            f"{K} keys do not fit in {step.block_tables_RX.shape[1]} pages of {page_size}",
            "pass longer block tables",
        )
    if step.last_keys_T is not None:
        raise KernelError(
            f"{op} last_keys", "expected None: rows see the keys up to their own", "leave it out"
        )
    score = dispatch.implementation(
        BLOCK_SCORES, device=q_TJD.device.type, dtype=q_TJD.dtype, requested=kernel
    )
    requests_T, last_T = rows_and_positions(step, T)
    num_blocks = -(-K // block_size)
    tables, counts = [], []
    for start in range(0, max(T, 1), rows_of_block(J * num_blocks)):
        some = slice(start, start + rows_of_block(J * num_blocks))
        of_rows = step.block_tables_RX, requests_T[some], last_T[some]
        scores_NJY = score(q_TJD[some], keys_PBD, *of_rows, num_keys=K, block_size=block_size)
        distance_NY = last_T[some, None] // block_size - torch.arange(
            num_blocks, device=q_TJD.device
        )
        is_local_NY = (distance_NY >= 0) & (distance_NY < local)
        scores_NJY = scores_NJY.masked_fill(is_local_NY[:, None], torch.inf)
        blocks_NJS = top_indices(scores_NJY, most)
        pages_NJX, counts_NJ = _pages_of(
            blocks_NJS, *of_rows, block_size=block_size, page_size=page_size
        )
        tables.append(pages_NJX)
        counts.append(counts_NJ)
    return SelectedBlocks(
        tables_JTX=torch.cat(tables).transpose(0, 1).contiguous(),
        counts_JT=torch.cat(counts).transpose(0, 1).contiguous(),
    )


def _pages_of(
    blocks_NJS: torch.Tensor,
    tables_RX: torch.Tensor,
    requests_N: torch.Tensor,
    last_N: torch.Tensor,
    *,
    block_size: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages [N, J, X] of selected blocks, and the number of their keys that a row sees.

    A row's last selected block alone may have keys after the row.
    """
    first_NJS = blocks_NJS * block_size
    seen_NJS = (last_N[:, None, None] + 1 - first_NJS).clamp(0, block_size)
    of_block = block_size // page_size
    places_NJX = blocks_NJS[..., None] * of_block + torch.arange(of_block, device=blocks_NJS.device)
    places_NJX = places_NJX.flatten(2)
    most = tables_RX.shape[1] - 1
    pages_NJX = tables_RX[requests_N.long()[:, None, None], places_NJX.clamp(max=most)]
    is_seen_NJX = (seen_NJS > 0).repeat_interleave(of_block, dim=2) & (places_NJX <= most)
    return torch.where(is_seen_NJX, pages_NJX, 0), seen_NJS.sum(-1).int()


def block_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    selected: SelectedBlocks,
    *,
    scale: float,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return attention of each row over its selected blocks only: [T, H, D].

    Each row runs as a request of `paged_attention` of its own, once for each KV head: its pages are
    those of its blocks, of which only the last one is seen in part.
    """
    op = "block_attention"
    T, heads, _ = expect_ndim(f"{op} q", q_THD, 3)
    J = cache.num_kv_heads
    check_tensor(f"{op} tables", selected.tables_JTX, (J, T, None), (torch.int32,), q_THD)
    check_tensor(f"{op} counts", selected.counts_JT, (J, T), (torch.int32,), q_THD)
    group, found = heads // J, []
    starts_T1 = torch.arange(T + 1, dtype=torch.int32, device=q_THD.device)
    for head in range(J):
        step = AttentionStep(
            block_tables_RX=selected.tables_JTX[head],
            query_starts_R1=starts_T1,
            context_lengths_R=selected.counts_JT[head],
            max_query_len=1,
            max_context_len=selected.tables_JTX.shape[2] * cache.page_size,
        )
        q_TGD = q_THD[:, head * group : (head + 1) * group]
        found.append(
            paged_attention(
                q_TGD, _of_head(cache, head), step, scale=scale, window=None, kernel=kernel
            )
        )
    return torch.cat(found, 1)


def _of_head(cache: PagedKv, head: int) -> PagedKv:
    """Return the pages of one KV head, as a view."""
    own = slice(head, head + 1)
    scales = cache.k_scales, cache.v_scales
    k_scales, v_scales = (None if each is None else each[:, :, own] for each in scales)
    return replace(
        cache,
        k_pages=cache.k_pages[:, :, own],
        v_pages=cache.v_pages[:, :, own],
        k_scales=k_scales,
        v_scales=v_scales,
    )
