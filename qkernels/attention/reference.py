"""Plain torch references of rotary embedding, KV writes and paged attention.

Legend: see qkernels/ops.py; L keys.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from formats.numerics.activation import quantize_input as round_input
from formats.numerics.activation import to_codes
from formats.scheme import ActivationSpec
from qkernels.attention.cache import INT4_PAGES, AttentionStep, PagedKv
from qkernels.attention.int4.codes import decode_rows, encode_rows, rotate_heads
from qkernels.operands.limbs import LimbForm, Limbs
from qkernels.operands.limbs_reference import to_limbs
from qkernels.operands.split_k import LinearOutput, reduced
from qkernels.rowwise.reference import normalized
from qkernels.rowwise.spec import NormSpec

# Elements of keys (and of values) that are gathered together for a batch of decode rows, so that
# they stay in a CPU's cache. 64 rows of 512 keys with J 4 and D 32 take 8.5 ms at 2^20, 23 ms at
# 2^22 and 15 ms at 2^16, in one thread.
GATHER_ELEMENTS = 2**20


def apply_rope(
    q_THD: torch.Tensor,
    k_TJD: torch.Tensor,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first cos_sin.shape[1] channels of each head, in float32.

    A pair is a channel of each half (NeoX), or two neighboring channels if `interleaved`.
    """
    half = cos_sin.shape[1] // 2
    cos_T1F, sin_T1F = cos_sin[positions_T.long()][:, None].split([half, half], dim=-1)
    rotate = _rotate_neighbours if interleaved else _rotate
    return rotate(q_THD, cos_T1F, sin_T1F), rotate(k_TJD, cos_T1F, sin_T1F)


def _rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    width = 2 * cos.shape[-1]
    first, second = x[..., 0:width:2].float(), x[..., 1:width:2].float()
    rotated = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.flatten(-2).to(x.dtype), x[..., width:]], dim=-1)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * half :]], dim=-1)


def write_kv_(
    k_TJD: torch.Tensor,
    v_TJD: torch.Tensor,
    cache: PagedKv,
    slots_T: torch.Tensor,
) -> None:
    """Write each token's key and value into its slot, page * B + offset; slot -1 is padding."""
    if not slots_T.numel():
        return
    # Indexing with a mask would make the host wait for the device. Instead each padding token
    # repeats value and slot of the first real token. If there is none, the old contents of slot 0
    # are written back.
    valid_T = slots_T >= 0
    tokens_T = torch.arange(slots_T.shape[0], device=slots_T.device)
    source_T = torch.where(valid_T, tokens_T, valid_T.int().argmax())
    slot_T = slots_T[source_T].long().clamp(min=0)
    index = (slot_T // cache.page_size, slot_T % cache.page_size)
    for rows, pages, scales_PBJ in (
        (k_TJD, cache.k_pages, cache.k_scales),
        (v_TJD, cache.v_pages, cache.v_scales),
    ):
        rows = rows[source_T]
        if cache.is_4bit:
            rows, pairs_TJ2 = encode_rows(rows, is_key=pages is cache.k_pages)
            old_TJ2 = scales_PBJ[index]
            scales_PBJ.index_put_(index, torch.where(valid_T.any(), pairs_TJ2, old_TJ2))
        elif scales_PBJ is not None:
            old_TJ = scales_PBJ[index]
            given_TJ = old_TJ if cache.static_scales else None
            rows, scales_TJ = _quantize_kv(rows, pages.dtype, given_TJ)
            if not cache.static_scales:
                scales_PBJ.index_put_(index, torch.where(valid_T.any(), scales_TJ, old_TJ))
        # as bytes, because not every device has torch.where for float8
        stored = pages if pages.element_size() > 1 else pages.view(torch.uint8)
        rows = rows.to(pages.dtype).view(stored.dtype)
        stored.index_put_(index, torch.where(valid_T.any(), rows, stored[index]))


def _quantize_kv(
    x_TJD: torch.Tensor, dtype: torch.dtype, scales_TJ: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [T, J, D] of `dtype` and scales [T, J].

    The scales are `scales_TJ`, or computed for each row.
    """
    kind = "int" if dtype == torch.int8 else "float"
    if scales_TJ is not None:
        return to_codes(x_TJD.float(), scales_TJ[..., None], kind), scales_TJ
    codes, scales = round_input(x_TJD.flatten(0, 1), ActivationSpec(type=kind), None)
    return codes.view(x_TJD.shape), scales.view(x_TJD.shape[:2])


def rope_write_kv_(
    q_THD: LinearOutput,
    k_TJD: LinearOutput,
    v_TJD: LinearOutput,
    cos_sin: torch.Tensor,
    positions_T: torch.Tensor,
    cache: PagedKv,
    slots_T: torch.Tensor,
    *,
    q_norm_D: torch.Tensor | None = None,
    k_norm_D: torch.Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
    query_scales: torch.Tensor | None = None,
    inputs_ready: bool = False,  # not used: torch keeps the order
) -> torch.Tensor:
    """Normalize q and k if norms are given, rotate them, write k and v; return q, scaled.

    With 4-bit pages q also gets the Hadamard rotation of the keys (int4/codes.py).
    """
    q_THD, k_TJD, v_TJD = reduced(q_THD), reduced(k_TJD), reduced(v_TJD)
    if q_norm_D is not None:
        q_THD = normalized(q_THD, NormSpec(weight_C=q_norm_D, eps=eps))
        k_TJD = normalized(k_TJD, NormSpec(weight_C=k_norm_D, eps=eps))
    q_THD, k_TJD = apply_rope(q_THD, k_TJD, cos_sin, positions_T, interleaved)
    write_kv_(k_TJD, v_TJD, cache, slots_T)
    if cache.is_4bit:
        q_THD = rotate_heads(q_THD)
    if query_scales is not None:
        q_THD = (q_THD * query_scales[positions_T][:, None, None]).to(q_THD.dtype)
    return q_THD


def paged_attention(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    limbs: LimbForm | None = None,
    inputs_ready: bool = False,  # not used: torch keeps the order
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
    out_THD: torch.Tensor | None = None,  # written instead of a new tensor
) -> torch.Tensor | Limbs:
    """Causal attention of each request's query rows over its paged keys, in float32: [T, H, D].

    Row i of a request with `count` rows has position context_length - count + i. It sees itself and
    the `window` - 1 keys before it (None: all keys before it), with `chunk_size` only keys of its
    own chunk of positions, and with `last_keys_T` also keys after it. Rows that see no key or
    belong to no request are zero.
    """
    keys = _Pages(cache.k_pages, cache.k_scales)
    values = _Pages(cache.v_pages, cache.v_scales)
    starts = step.query_starts_R1.tolist()
    counts = [end - start for start, end in zip(starts, starts[1:], strict=False)]
    lengths = step.context_lengths_R.tolist()
    first, end = (0, len(counts)) if step.bounds_2 is None else step.bounds_2.tolist()
    computed = range(first, min(end, len(counts)))
    if out_THD is None:
        out_THD = torch.zeros_like(q_THD)
    elif computed:
        out_THD[starts[computed[0]] : starts[computed[-1] + 1]] = 0
    decodes = [r for r in computed if counts[r] == 1 and lengths[r] > 0]
    # sorted, so that rows of similar length share a gather and little is wasted on padding
    decodes.sort(key=lambda r: lengths[r])
    page_elements = cache.num_kv_heads * q_THD.shape[2]
    while decodes:
        longest = min(lengths[decodes[-1]], window or chunk_size or lengths[decodes[-1]])
        size = max(1, GATHER_ELEMENTS // (longest * page_elements))
        batch, decodes = decodes[-size:], decodes[:-size]
        rows = torch.tensor([starts[r] for r in batch], device=q_THD.device)
        out_THD[rows] = _decode(
            q_THD[rows],
            keys,
            values,
            step.block_tables_RX[batch],
            step.context_lengths_R[batch],
            longest,
            scale,
            window,
            soft_cap,
            sinks_H,
            slopes_H,
            chunk_size,
        ).to(out_THD.dtype)
    for r in computed:
        if counts[r] > 1 and lengths[r] > 0:
            rows = slice(starts[r], starts[r] + counts[r])
            out_THD[rows] = _chunk(
                q_THD[rows],
                keys,
                values,
                step.block_tables_RX[r],
                lengths[r],
                scale,
                window,
                soft_cap,
                sinks_H,
                slopes_H,
                chunk_size,
                None if step.last_keys_T is None else step.last_keys_T[rows],
            ).to(out_THD.dtype)
    return out_THD if limbs is None else to_limbs(out_THD.flatten(1), limbs)


def paged_attention_by_rows(
    q_THD: torch.Tensor,
    cache: PagedKv,
    step: AttentionStep,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute `paged_attention` of each row alone, so a row's bits depend only on its position.

    A row that sees keys after its own is computed as the row of the last such key, with a window
    that is longer by their number.
    """
    keys = _Pages(cache.k_pages, cache.k_scales)
    values = _Pages(cache.v_pages, cache.v_scales)
    starts, lengths = step.query_starts_R1.tolist(), step.context_lengths_R.tolist()
    last_keys_T = None if step.last_keys_T is None else step.last_keys_T.tolist()
    out_THD = torch.zeros_like(q_THD)
    for r, length in enumerate(lengths):
        for row in range(starts[r], starts[r + 1]):
            seen = length - (starts[r + 1] - 1 - row)
            if seen > 0:
                ahead = 0 if last_keys_T is None else max(0, last_keys_T[row] + 1 - seen)
                one = slice(row, row + 1)
                out_THD[one] = _chunk(
                    q_THD[one],
                    keys,
                    values,
                    step.block_tables_RX[r],
                    seen + ahead,
                    scale,
                    None if window is None else window + ahead,
                    soft_cap,
                    sinks_H,
                    slopes_H,
                    chunk_size,
                    None,
                ).to(out_THD.dtype)
    return out_THD


class _Pages(NamedTuple):
    """Pages of keys or of values; 8-bit and 4-bit codes have scales."""

    pages_PBJD: torch.Tensor
    scales_PBJ: torch.Tensor | None

    def gather(self, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return float32 [..., J, D] at (pages, offsets); keys of 4-bit pages stay rotated."""
        if self.pages_PBJD.dtype == INT4_PAGES:
            return decode_rows(self.pages_PBJD[index], self.scales_PBJ[index])
        found = self.pages_PBJD[index].float()
        return found if self.scales_PBJ is None else found * self.scales_PBJ[index][..., None]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
    biases: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax(cap * tanh(scale * q k / cap) + biases) v, masked.

    `sinks` are the scores of one more key.
    """
    if soft_cap is None and sinks is None and biases is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    scores = q @ k.transpose(-1, -2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if biases is not None:
        scores = scores + biases
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return scores.softmax(-1) @ v
    with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return with_sinks.softmax(-1)[..., :-1] @ v


def _decode(
    q_RHD: torch.Tensor,
    keys: _Pages,
    values: _Pages,
    block_tables_RX: torch.Tensor,
    lengths_R: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
    slopes_H: torch.Tensor | None,
    chunk_size: int | None,
) -> torch.Tensor:
    """Attend with one row per request; the queries that share a KV head are rows of one product."""
    lengths_R1 = lengths_R.long()[:, None]
    if window is not None:
        first_R1 = (lengths_R1 - window).clamp(min=0)
    elif chunk_size is not None:
        first_R1 = (lengths_R1 - 1) // chunk_size * chunk_size
    else:
        first_R1 = torch.zeros_like(lengths_R1)
    positions_RL = first_R1 + torch.arange(longest, device=q_RHD.device)
    visible_RL = positions_RL < lengths_R1
    positions_RL = positions_RL.minimum(lengths_R1 - 1)
    page_size, num_kv_heads = keys.pages_PBJD.shape[1:3]
    index = (block_tables_RX.gather(1, positions_RL // page_size).long(), positions_RL % page_size)
    q_RJQD = q_RHD.float().unflatten(1, (num_kv_heads, -1))
    k_RJLD, v_RJLD = (pages.gather(index).transpose(1, 2) for pages in (keys, values))
    sinks = None if sinks_H is None else sinks_H.view(num_kv_heads, -1, 1)
    biases = None
    if slopes_H is not None:
        distances_RL = positions_RL - (lengths_R1 - 1)
        biases = slopes_H.view(num_kv_heads, -1, 1) * distances_RL[:, None, None]
    visible = visible_RL[:, None, None]
    out_RJQD = _attend(q_RJQD, k_RJLD, v_RJLD, visible, scale, soft_cap, sinks, biases)
    return out_RJQD.flatten(1, 2)


def _chunk(
    q_SHD: torch.Tensor,
    keys: _Pages,
    values: _Pages,
    block_table_X: torch.Tensor,
    length: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None,
    slopes_H: torch.Tensor | None,
    chunk_size: int | None,
    last_keys_S: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with the last S rows of one request, over the keys that any of them sees."""
    count, (page_size, num_kv_heads) = q_SHD.shape[0], keys.pages_PBJD.shape[1:3]
    first = 0 if window is None else max(0, length - count - window + 1)
    if chunk_size is not None:
        first = max(0, length - count) // chunk_size * chunk_size
    keys_L = torch.arange(first, length, device=q_SHD.device)
    index = (block_table_X[keys_L // page_size].long(), keys_L % page_size)
    queries_S1 = torch.arange(length - count, length, device=q_SHD.device)[:, None]
    visible_SL = keys_L <= (queries_S1 if last_keys_S is None else last_keys_S[:, None])
    if window is not None:
        visible_SL &= keys_L > queries_S1 - window
    if chunk_size is not None:
        visible_SL &= keys_L >= queries_S1 // chunk_size * chunk_size
    k_JLD, v_JLD = (pages.gather(index).transpose(0, 1) for pages in (keys, values))
    q_JQSD = q_SHD.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
    k_JQLD, v_JQLD = (x[:, None].expand(-1, q_JQSD.shape[1], -1, -1) for x in (k_JLD, v_JLD))
    sinks = None if sinks_H is None else sinks_H.view(num_kv_heads, -1, 1, 1)
    biases = None
    if slopes_H is not None:
        biases = slopes_H.view(num_kv_heads, -1, 1, 1) * (keys_L - queries_S1)
    out_JQSD = _attend(q_JQSD, k_JQLD, v_JQLD, visible_SL, scale, soft_cap, sinks, biases)
    return torch.where(queries_S1[:, :, None] >= 0, out_JQSD.flatten(0, 1).transpose(0, 1), 0)
