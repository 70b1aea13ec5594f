"""Division of memory between KV pages and snapshots of states.

A request continues where both are cached. Snapshots get a share of the memory, but not more than
prompts can use: one for each SPACING tokens of the pages.
"""

from qserve.engine.kv_cache import state_snapshots


def split_memory(
    room: int,
    *,
    page_bytes: int,
    state_bytes: int,
    page_size: int,
    share: float,
    most_pages: int | None = None,
) -> tuple[int, int]:
    """Return the numbers of pages and of snapshots that fit into `room` bytes.

    `share`: of the memory, for snapshots. `page_size`: tokens of a page. `most_pages`: that can be
    in use; snapshots also get what these leave.
    """
    if not state_bytes:
        return room // page_bytes, 0
    spacing = state_snapshots.SPACING
    spaced = spacing / page_size * page_bytes + state_bytes  # a snapshot and its pages
    most = int(room / spaced)
    count = min(most, int(room * share) // state_bytes)
    if most_pages is not None:
        left = room - most_pages * page_bytes
        most = most_pages * page_size // spacing
        count = min(most, max(count, left // state_bytes))
    return (room - count * state_bytes) // page_bytes, count
