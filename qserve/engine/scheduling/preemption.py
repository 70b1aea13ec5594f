"""Victim policy: selects the running requests that are cheapest to preempt."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request


def num_lost(request: Request, pool: BlockPool) -> int:
    """Return how many tokens a preempted request may recompute: those in its unshared pages."""
    return request.num_computed - pool.num_shared(request.block_table) * pool.page_size


def cheapest_victim(running: Sequence[Request], pool: BlockPool) -> Request | None:
    """Return the cheapest request to preempt at the lowest priority; ties go to the youngest.

    Returns None if no request has an unshared page: preemption would then free nothing.
    """
    candidates = [
        request
        for request in running
        if request.level == running[-1].level and pool.num_unshared(request.block_table)
    ]
    return min(reversed(candidates), key=lambda each: num_lost(each, pool), default=None)


def victims_for(
    owned: Sequence[Request], pool: BlockPool, request: Request, max_bypasses: int
) -> list[Request] | None:
    """Select requests from the end of `owned` until preempting them frees enough for `request`.

    Skips requests that were bypassed `max_bypasses` times. Returns None if the pages do not
    suffice.
    """
    victims, num_free = [], pool.num_free
    for victim in reversed(owned):
        if victim.num_bypasses >= max_bypasses:
            continue
        victims.append(victim)
        num_free += pool.num_unshared(victim.block_table)
        if num_free >= pool.pages_for(request.num_slots(request.num_tokens)):
            return victims
    return None


def fair_victims(
    running: Sequence[Request],
    pool: BlockPool,
    request: Request,
    fits: bool,
    max_bypasses: int,
) -> list[Request] | None:
    """Select victims of the client, or else of the group, that runs the most requests.

    The youngest requests are selected until `request` has room, but never the oldest one and no
    request of a lower level. Returns an empty list if `request` already `fits`, and None if its
    client and group run requests already, or if preempting all would not suffice.
    """
    for owner_of in (attrgetter("client"), attrgetter("flow")):
        counts = Counter(owner_of(each) for each in running)
        if not counts or counts[owner_of(request)]:
            continue
        if fits:
            return []
        owner, _ = counts.most_common(1)[0]
        owned = [each for each in running if owner_of(each) == owner][1:]
        owned = [each for each in owned if each.level >= request.level]
        victims = victims_for(owned, pool, request, max_bypasses)
        if victims is not None:
            return victims
    return None
