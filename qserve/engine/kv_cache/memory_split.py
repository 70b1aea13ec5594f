"""Division of memory between KV pages and state snapshots.

A request can reuse a prefix only if both its pages and a snapshot are cached. Snapshots get a
fraction of the memory, but at most one snapshot for each SPACING tokens of the pages.
"""

from qserve.engine.kv_cache import state_snapshots


def split_memory(
    room: int,
    *,
    page_bytes: int,
    state_bytes: int,
    page_size: int,
    share: float,
    max_pages: int | None = None,
) -> tuple[int, int]:
    """Return the number of pages and the number of snapshots that fit into `room` bytes.

    `share`: fraction of the memory for snapshots. `page_size`: tokens in one page. `max_pages`:
    maximum number of pages that can be in use; snapshots also get the memory beyond these pages.
    """
    if not state_bytes:
        return room // page_bytes, 0
    spacing = state_snapshots.SPACING
    spaced = spacing / page_size * page_bytes + state_bytes  # a snapshot and its pages
    most = int(room / spaced)
    count = min(most, int(room * share) // state_bytes)
    if max_pages is not None:
        left = room - max_pages * page_bytes
        most = max_pages * page_size // spacing
        count = min(most, max(count, left // state_bytes))
    return (room - count * state_bytes) // page_bytes, count
