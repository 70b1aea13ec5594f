"""Attention in segments of keys: near the reference in float32, and one order for splits, tiles and
chunks."""

from dataclasses import dataclass, replace

import pytest
import torch

from qkernels.attention import reference
from qkernels.attention.cache import AttentionStep, PagedKv
from qkernels.attention.fixed_order import triton_segments
from qkernels.attention.fixed_order.config import tile_config

B, J = 16, 2


@dataclass(frozen=True, kw_only=True)
class Case:
    q: torch.Tensor
    cache: PagedKv
    step: AttentionStep
    options: dict

    @classmethod
    def make(cls, counts, lengths, dtype, device, *, group=2, D=32, codes=None, **options):
        """Unused pages, and the rest of last ones, hold NaN or large codes."""
        generator = torch.Generator().manual_seed(D + group)
        R, X = len(counts), -(-max(lengths) // B)
        stored = codes or dtype
        junk = float("nan") if stored.is_floating_point else 113
        pages = torch.full((R * X + 1, B, 2, J, D), junk, dtype=stored)
        scales = torch.full((R * X + 1, B, 2, J), float("nan"))
        tables = torch.randperm(R * X + 1, generator=generator)[: R * X].view(R, X).int()
        for r, length in enumerate(lengths):
            t = torch.arange(length)
            places = tables[r, t // B].long(), t % B
            kv = torch.randn(length, 2, J, D, generator=generator)
            if codes is not None:
                scales[places] = torch.rand(length, 2, J, generator=generator) / 20 + 0.01
                pages.view(torch.uint8)[places] = (kv * 30).to(codes).view(torch.uint8)
            else:
                pages[places] = kv.to(dtype)
            tables[r, -(-length // B) :] = -7  # stale
        k_pages, v_pages = pages.to(device).unbind(2)
        k_scales, v_scales = scales.to(device).unbind(2) if codes is not None else (None, None)
        q = torch.randn(sum(counts), group * J, D, generator=generator).to(device, dtype)
        cache = PagedKv(k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)
        settings = {"scale": D**-0.5, "window": None, **options}
        return cls(q=q, cache=cache, step=make_step(tables, counts, lengths), options=settings)

    def run(self, **changes):
        return triton_segments.paged_attention(
            self.q, self.cache, self.step, **self.options, **changes
        )

    def exact(self):
        cache = self.cache
        if not cache.is_8bit:
            pages = {"k_pages": cache.k_pages.float(), "v_pages": cache.v_pages.float()}
            cache = replace(cache, **pages)
        return reference.paged_attention(self.q.float(), cache, self.step, **self.options)

    def rows(self, first, count):
        """Some rows of the one request that there is."""
        (length,) = self.step.context_lengths_R.tolist()
        length -= self.q.shape[0] - first - count
        step = make_step(self.step.block_tables_RX, (count,), (length,))
        return replace(self, q=self.q[first : first + count], step=step)

    def tile(self, max_query_len):
        H, D = self.q.shape[1:]
        size = self.q.element_size()
        return tile_config(
            heads_per_kv_head=H // J,
            head_dim=D,
            element_size=size,
            max_query_len=max_query_len,
        )


def make_step(tables, counts, lengths):
    device = tables.device
    return AttentionStep(
        block_tables_RX=tables,
        query_starts_R1=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        context_lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_query_len=max(counts),
        max_context_len=max(lengths),
    )


OPTIONS = {
    "plain": {},
    "window": {"window": 100},
    "chunked": {"chunk_size": 96},
    "capped": {"soft_cap": 8.0},
    "sinks": {"sinks_H": torch.linspace(-2, 3, 4)},
    "ALiBi": {"slopes_H": torch.linspace(0.01, 0.5, 4)},
}


@pytest.mark.parametrize("codes", [None, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", OPTIONS)
def test_rows_attend_to_their_keys(name, codes, half, device, assert_close, tolerance, poison):
    """Contexts below, at and beyond a segment; a request without rows; any number of programs."""
    counts, lengths = (1, 3, 0, 2, 5), (33, 129, 4, 2, 300)
    options = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value
        for key, value in OPTIONS[name].items()
    }
    case = Case.make(counts, lengths, half, device, codes=codes, **options)
    case = replace(
        case, step=replace(case.step, block_tables_RX=case.step.block_tables_RX.to(device))
    )
    got = case.run(splits=1)
    assert_close("out", case.exact(), got, 2 * tolerance(half))
    for splits in (2, 3):
        assert torch.equal(case.run(splits=splits), got), splits


@pytest.mark.parametrize("group, D", [(1, 24), (7, 80), (4, 256)])
def test_head_sizes(group, D, half, device, assert_close, tolerance, poison):
    case = Case.make((2, 19), (140, 30), half, device, group=group, D=D, codes=torch.int8)
    got = case.run()
    assert_close("out", case.exact(), got, 2 * tolerance(half))


def test_row_has_same_bits_in_any_chunk(half, device, poison):
    """Also in tiles of decodes, at the same place: the interpreter's products differ by it."""
    case = Case.make((24,), (270,), half, device, codes=torch.int8)
    want = case.run(splits=1)
    for first, count in ((0, 16), (8, 3), (16, 1), (16, 8)):
        part = case.rows(first, count)
        for splits in (1, 2):
            got = part.run(splits=splits, config=case.tile(24))
            assert torch.equal(got, want[first : first + count]), (first, count)


def with_images(case, images):
    """Rows of the one request that see the keys of their image, which may end in a later row."""
    (length,) = case.step.context_lengths_R.tolist()
    count = case.q.shape[0]
    last_T = torch.arange(length - count, length)
    for first, last in images:
        inside = (last_T >= first) & (last_T <= last)
        last_T[inside] = last
    return replace(case, step=replace(case.step, last_keys_T=last_T.to(case.q.device)))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("codes", [None, torch.int8])
def test_image_rows_attend_bidirectionally(
    codes, window, half, device, assert_close, tolerance, poison
):
    """Images in one segment and over two; text before, between and after keeps its bits."""
    images = (100, 140), (150, 163), (270, 271)
    case = Case.make((200,), (290,), half, device, codes=codes, window=window)
    case = replace(
        case, step=replace(case.step, block_tables_RX=case.step.block_tables_RX.to(device))
    )
    plain, case = case.run(), with_images(case, images)

    def run(rows):
        out = rows.run()
        seen = rows.step.last_keys_T
        triton_segments.attend_(
            out, rows.q, rows.cache, rows.step, **rows.options, last_keys_T=seen
        )
        return out

    got = run(case)
    assert_close("out", case.exact(), got, 2 * tolerance(half))
    position = torch.arange(90, 290, device=device)
    changes = torch.zeros(200, dtype=torch.bool, device=device)
    for first, last in images:
        changes |= (position >= first) & (position < last)
    assert torch.equal(got[~changes], plain[~changes])
    assert (got[changes] != plain[changes]).any((1, 2)).all()
    # Ends of images in each; at the same place in a tile, as above.
    for first, count in ((0, 51), (48, 32), (176, 24)):
        rows = with_images(case.rows(first, count), images)
        assert torch.equal(run(rows), got[first : first + count]), (first, count)
