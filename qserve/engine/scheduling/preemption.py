"""Victim policy: the running requests that are cheapest to preempt."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from qserve.engine.kv_cache.block_pool import BlockPool
from qserve.engine.request import Request


def num_lost(request: Request, pool: BlockPool) -> int:
    """Tokens that a preempted request may have to recompute: those in pages that it alone holds."""
    return request.num_computed - pool.num_shared(request.block_table) * pool.page_size


def cheapest_victim(running: Sequence[Request], pool: BlockPool) -> Request | None:
    """Cheapest request to preempt at the lowest priority; ties go to the youngest.

    None if no request holds an unshared page, so that preemption would free nothing.
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
    """Fewest requests of `owned`, from the last, whose preemption frees enough pages; or None.

    A request is preempted `max_bypasses` times at most.
    """
    victims, num_free = [], pool.num_free
    for victim in reversed(owned):
        if victim.num_bypasses >= max_bypasses:
            continue
        victims.append(victim)
        num_free += pool.num_unshared(victim.block_table)
        if num_free >= pool.pages_for(request.num_tokens):
            return victims
    return None


def fair_victims(
    running: Sequence[Request],
    pool: BlockPool,
    request: Request,
    fits: bool,
    max_bypasses: int,
) -> list[Request] | None:
    """Youngest requests of the client, or else of the group, that runs most, except its oldest.

    As many as needed to make room for `request`; empty if it `fits`. None if its client and
    group run requests already, or if preempting all would not suffice. No request of a level below
    that of `request` is preempted.
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
