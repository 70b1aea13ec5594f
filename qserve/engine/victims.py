"""Which running requests give their pages back: those that lose least by it. Knows no queue."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from qserve.engine.kv_pages import PagePool
from qserve.engine.request import Request


def num_lost(request: Request, pool: PagePool) -> int:
    """Tokens that a request may have to compute again: those in pages that nobody else holds."""
    return request.num_computed - pool.num_shared(request.block_table) * pool.page_size


def cheapest_victim(running: Sequence[Request], pool: PagePool) -> Request | None:
    """Who of the last level loses least; of equals the youngest, which stands last.

    None where nobody holds a page alone, so that its going would free none.
    """
    candidates = [
        request
        for request in running
        if request.level == running[-1].level and pool.num_alone(request.block_table)
    ]
    return min(reversed(candidates), key=lambda each: num_lost(each, pool), default=None)


def places_of(
    owned: Sequence[Request], pool: PagePool, request: Request, max_bypasses: int
) -> list[Request] | None:
    """Of some running requests as many, the last first, as make place for another; or None.

    Each gives way a limited number of times.
    """
    victims, num_free = [], pool.num_free
    for victim in reversed(owned):
        if victim.num_bypasses >= max_bypasses:
            continue
        victims.append(victim)
        num_free += pool.num_alone(victim.block_table)
        if num_free >= pool.pages_for(request.num_tokens):
            return victims
    return None


def fair_victims(
    running: Sequence[Request],
    pool: PagePool,
    request: Request,
    has_place: bool,
    max_bypasses: int,
) -> list[Request] | None:
    """The youngest of the client, or else of the group, that runs most, but not its oldest.

    As many as make place for `request`, none where it `has_place`; None where it has its share, or
    all are not enough. None of a lower level than its own gives way.
    """
    for owner_of in (attrgetter("client"), attrgetter("flow")):
        counts = Counter(owner_of(each) for each in running)
        if not counts or counts[owner_of(request)]:
            continue
        if has_place:
            return []
        owner, _ = counts.most_common(1)[0]
        owned = [each for each in running if owner_of(each) == owner][1:]
        owned = [each for each in owned if each.level >= request.level]
        victims = places_of(owned, pool, request, max_bypasses)
        if victims is not None:
            return victims
    return None
