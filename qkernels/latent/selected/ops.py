"""Selection of keys by an indexer, and attention over the selected keys.

Each function checks its arguments, then runs a kernel.

    T  rows of a step          I  heads of the indexer
    R  requests                D  numbers of its keys
    H  query heads             K  keys
    E  numbers of an entry     S  selected keys
    L  numbers of its latent   P  pages
    B  tokens of a page        X  pages of a block table
"""

import torch

from qkernels import dispatch
from qkernels.attention.cache import AttentionStep
from qkernels.attention.selected.order import rows_and_positions, rows_of_block
from qkernels.checks import check_float, check_tensor, expect_ndim
from qkernels.errors import KernelError
from qkernels.latent import rows
from qkernels.latent.cache import PagedLatents, is_aligned
from qkernels.latent.selected.select import highest
from qkernels.latent.selected.selected_keys import SelectedKeys


def write_index_keys_(k_TD: torch.Tensor, keys_PBD: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write each token's key into its slot, page * B + offset; slot -1 is padding.

    The host does not wait: a padding token rewrites the first real token, or else the old key.
    """
    op = "write_index_keys_"
    check_float(f"{op} k", k_TD)
    T, D = expect_ndim(f"{op} k", k_TD, 2)
    check_tensor(f"{op} keys", keys_PBD, (None, None, D), (k_TD.dtype,), k_TD)
    check_tensor(f"{op} slots", slots_T, (T,), (torch.int32, torch.int64), k_TD)
    if T == 0:
        return
    valid_T = slots_T >= 0
    tokens_T = torch.arange(T, device=k_TD.device)
    source_T = torch.where(valid_T, tokens_T, valid_T.int().argmax())
    slot_T = slots_T[source_T].long().clamp(min=0)
    flat_XD = keys_PBD.view(-1, D)
    flat_XD[slot_T] = torch.where(valid_T.any(), k_TD[source_T], flat_XD[slot_T])


def select_keys(
    q_TID: torch.Tensor,
    weights_TI: torch.Tensor,
    keys_PBD: torch.Tensor,
    step: AttentionStep,
    *,
    most: int,
    last_T: torch.Tensor | None = None,
    num_keys: int | None = None,
    kernel: str | None = None,
) -> SelectedKeys:
    """Return the keys with the `most` highest scores for each row, among those up to its position.

    `last_T`: number of the last key that each row sees, int32, -1: none, and `num_keys`: keys of
    the longest request; None: each token has a key.

    score = sum over heads of weights * relu(q k), in float32. A row with at most that many keys
    sees all of them. `kernel` requests a row of index_scores, or forbids some with a leading minus.
    """
    op = "select_keys"
    check_float(f"{op} q", q_TID)
    T, heads, D = expect_ndim(f"{op} q", q_TID, 3)
    check_tensor(f"{op} weights", weights_TI, (T, heads), (torch.float32,), q_TID)
    check_tensor(f"{op} keys", keys_PBD, (None, None, D), (q_TID.dtype,), q_TID)
    if not keys_PBD.is_contiguous():
        raise KernelError(
            f"{op} keys",
            f"expected contiguous, found {keys_PBD.stride()}",
            "make it contiguous",
        )
    page_size = keys_PBD.shape[1]
    K = step.max_context_len if num_keys is None else num_keys
    num_pages = step.block_tables_RX.shape[1]
    if num_pages * page_size < K:
        raise KernelError(
            f"{op} max_context_len",
            f"{K} keys do not fit in {num_pages} pages of {page_size}",
            "pass longer block tables",
        )
    score = dispatch.implementation(
        rows.INDEX_SCORES, device=q_TID.device.type, dtype=q_TID.dtype, requested=kernel
    )
    requests_T, positions_T = rows_and_positions(step, T)
    last_T = positions_T if last_T is None else last_T
    found = []
    for start in range(0, max(T, 1), rows_of_block(K)):
        some = slice(start, start + rows_of_block(K))
        of_rows = (step.block_tables_RX, requests_T[some], last_T[some])
        scores_NK = score(q_TID[some], weights_TI[some], keys_PBD, *of_rows, num_keys=K)
        found.append(highest(scores_NK, *of_rows, most=most, page_size=page_size))
    slots, counts = zip(*found, strict=True)
    return SelectedKeys(slots_TS=torch.cat(slots), counts_T=torch.cat(counts))


def selected_latent_attention(
    q_THE: torch.Tensor,
    cache: PagedLatents,
    selected: SelectedKeys,
    *,
    latent_width: int,
    scale: float,
    kernel: str | None = None,
) -> torch.Tensor:
    """Return attention of each row over its selected entries only: [T, H, L].

    As latent_attention, but row t sees the entries in the first `counts_T[t]` slots of
    `slots_TS[t]`. A choice of sm90_decode, which takes no pages of one entry, has no effect.
    """
    op = "selected_latent_attention"
    check_float(f"{op} q", q_THE)
    T, _, E = expect_ndim(f"{op} q", q_THE, 3)
    check_tensor(f"{op} slots", selected.slots_TS, (T, None), (torch.int32,), q_THE)
    check_tensor(f"{op} counts", selected.counts_T, (T,), (torch.int32,), q_THE)
    if not 1 <= latent_width < E:
        raise KernelError(
            f"{op} latent_width",
            f"expected 1 to {E - 1}, found {latent_width}",
            "pass the width without the rotated part",
        )
    run = dispatch.implementation(
        rows.SELECTED_LATENT_ATTENTION,
        device=q_THE.device.type,
        dtype=q_THE.dtype,
        requested=_without_sm90_decode(kernel),
        head_dim=E,
        page_size=1,
        pages_dtype=cache.pages.dtype,
        tma_pages=is_aligned(E, latent_width),
    )
    return run(q_THE, cache, selected, latent_width=latent_width, scale=scale)


def _without_sm90_decode(kernel: str | None) -> str | None:
    names = [name for name in (kernel or "").split(",") if name.strip(" -") != rows.SM90_DECODE]
    return ",".join(names) or None
