"""The masks of a step's rows, laid out. Knows requests, and no plan.

Legend: S rows that sample, P words of sampling, E words of biases and masks.
"""

from collections.abc import Collection

import numpy as np

from qkernels.sampling.words import HISTORY_ROW, MASK_START
from qserve.engine.mask_jobs import mask_of, masks_along
from qserve.engine.masks import allowed, dead_end
from qserve.engine.request import Request


def step_masks(
    requests: list[Request],
    positions: np.ndarray,
    ahead_S: np.ndarray,
    has_mask_S: np.ndarray,
    words_SP: np.ndarray,
    first: int,
    late: Collection[Request] = (),
) -> np.ndarray:
    """The masks of a step's samples, whose places from `first` on `words_SP` notes. int64 [E].

    `ahead_S`: how many drafts of its request come before each. Nobody takes what is sampled for
    those of `late`: it gets no mask, and penalties do not count it. A row that no token may follow
    has no mask either; its request is told why.
    """
    chosen = np.flatnonzero(has_mask_S)
    along = _masks_of_drafts([requests[index] for index in chosen[ahead_S[chosen] == 1]])
    found: list[np.ndarray] = []
    for index in chosen.tolist():
        request, ahead = requests[index], int(ahead_S[index])
        if request in late:
            words_SP[index, HISTORY_ROW] = -1
            continue
        if ahead and request.constraint is not None:
            mask = along[request].pop(0) if along[request] else None
        elif request.constraint is not None:
            mask = mask_of(request)
        else:
            token_ids = request.token_ids
            if ahead and request.token_filter.follows_output:
                token_ids = [*token_ids, *request.drafts[:ahead]]
            mask = allowed(request, int(positions[index]), token_ids, None)
        if mask is not None:
            words_SP[index, MASK_START] = first + len(found) * len(mask)
            found.append(mask)
        elif ahead == 0:
            request.dead_end = dead_end(request)
        elif request.most_emitted is None:  # the next step finds it, if the drafts come true
            request.most_emitted = ahead
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _masks_of_drafts(requests: list[Request]) -> dict[Request, list[np.ndarray | None]]:
    constrained = [request for request in requests if request.constraint is not None]
    if not constrained:
        return {}
    return dict(zip(constrained, masks_along(constrained), strict=True))
