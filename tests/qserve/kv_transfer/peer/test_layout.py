"""Heads that a rank reads from the ranks of another engine, for any two numbers of ranks."""

import pytest
import torch

from formats.errors import InputError
from qserve.kv_transfer.peer.layout import PageTensor, sources, widened


def tensors(heads: int, size: int) -> list[list[PageTensor]]:
    """A layer's keys of each of `size` ranks, as formats/in_memory/shards.py divides them."""
    found = []
    for rank in range(size):
        first, count = rank * heads // size, max(1, heads // size)
        made = {"layer": 0, "shape": [2, count, 3], "dtype": "float32", "item_bytes": 4}
        found.append([PageTensor(**made, axis=1, ranges=[(first, first + count)])])
    return found


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("theirs", [1, 2, 4, 8])
@pytest.mark.parametrize("ours", [1, 2, 4, 8])
def test_each_rank_gets_its_heads(heads, theirs, ours):
    whole = torch.randn(2, heads, 3)
    peers = tensors(heads, theirs)
    held = [whole.narrow(1, rank[0].ranges[0][0], rank[0].shape[1]) for rank in peers]
    for rank in tensors(heads, ours):
        got = torch.full((2, rank[0].shape[1], 3), torch.nan)
        for source in sources(rank, peers)[0]:
            part = held[source.rank].narrow(1, source.start, source.count)
            got.narrow(1, source.target, source.count).copy_(part)
        assert torch.equal(got, whole.narrow(1, rank[0].ranges[0][0], rank[0].shape[1]))


def test_latents_are_read_from_any_rank():
    latent = PageTensor(layer=0, shape=[2, 9], dtype="uint8", item_bytes=1, axis=None)
    (source,) = sources([latent], [[latent], [latent]])[0]
    assert (source.rank, source.start, source.count) == (0, 0, 1)


def test_missing_heads_are_refused():
    with pytest.raises(InputError, match="no rank of the other engine holds head 4"):
        sources(tensors(8, 1)[0], tensors(8, 2)[:1])


def test_tensors_are_widened_together():
    whole = torch.arange(128, dtype=torch.uint8).view(4, 2, 16)
    for a, b, is_wide in (
        (whole, whole.narrow(1, 1, 1), True),
        (whole.transpose(1, 2), whole, False),
        (whole[:, :, 1:], whole, False),
        (whole[:, :, :12], whole[:, :, :12], False),
    ):
        assert [each.dtype == torch.int64 for each in widened(a, b)] == [is_wide] * 2
    rows = torch.zeros(4, 2, 16, dtype=torch.uint8)
    target, source = widened(rows, whole)
    target[torch.tensor([3, 0])] = source[torch.tensor([1, 2])]
    assert torch.equal(rows[3], whole[1]) and torch.equal(rows[0], whole[2])
