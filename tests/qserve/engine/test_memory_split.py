"""Memory is divided between pages and snapshots of states."""

import pytest

from qserve.engine.kv_cache.memory_split import split_memory
from qserve.engine.kv_cache.state_snapshots import SPACING

MIB, GIB = 2**20, 2**30


def test_stateless_models_have_only_pages():
    sizes = {"page_bytes": 100, "state_bytes": 0, "page_size": 16, "share": 0.25}
    assert split_memory(1099, **sizes) == (10, 0)


@pytest.mark.parametrize("room", [0, GIB, 80 * GIB])
@pytest.mark.parametrize("state_bytes", [MIB // 4, 64 * MIB])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_snapshot_memory_share_is_bounded_by_prompts(room, state_bytes, share):
    sizes = {"page_bytes": 5 * MIB, "state_bytes": state_bytes, "page_size": SPACING}
    pages, count = split_memory(room, **sizes, share=share)
    assert 0 <= room - pages * 5 * MIB - count * state_bytes < 5 * MIB
    assert count <= pages + 1 and count * state_bytes <= share * room
    few_for_memory = (count + 1) * state_bytes > share * room
    one_for_each_page = count >= pages - 1
    assert few_for_memory or one_for_each_page


def test_snapshots_get_memory_unusable_by_pages():
    sizes = {"page_bytes": MIB, "state_bytes": 10 * MIB, "page_size": SPACING, "share": 0.25}
    assert split_memory(1000 * MIB, **sizes, max_pages=1000) == (750, 25)
    assert split_memory(1000 * MIB, **sizes, max_pages=300) == (300, 70)
    assert split_memory(1000 * MIB, **sizes, max_pages=50) == (500, 50)
