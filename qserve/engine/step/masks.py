"""Token masks of a request: the combination of its grammar and its token filter.

A mask is a row of int64 words, one bit per token (token_filter.py).
"""

from collections.abc import Sequence

import numpy as np

from formats.errors import InputError
from qserve.engine.request import Request
from qserve.engine.token_filter import TokenFilter, without
from qserve.structured.constraint import Constraint


def allowed(
    request: Request, position: int, token_ids: Sequence[int], constraint: Constraint | None
) -> np.ndarray | None:
    """Return the mask of the token at a position; None if grammar and filter allow no token.

    `token_ids`: the tokens before this position, which `constraint` has accepted. The function does
    not modify the request, so other threads may call it.
    """
    token_filter = request.token_filter
    ends = request.stop_token_ids | request.eos_token_ids
    may_end = request.may_end_after(position - request.num_prompt_tokens)
    mask = None if constraint is None else constraint.mask(ends, may_end)
    if token_filter is None:
        return mask
    own = token_filter.mask(token_ids, request.num_prompt_tokens)
    mask = own if mask is None else mask & own
    # If the output may not end yet, the sampler's bias forbids the end tokens.
    return mask if (mask if may_end else without(mask, ends)).any() else None


def token_filter(request: Request, vocab_size: int) -> TokenFilter:
    """Create a request's token filter. Raises InputError if the filter allows no token."""
    params = request.params
    made = TokenFilter(vocab_size, params.allowed_token_ids, params.bad_words_token_ids)
    mask = made.mask(request.token_ids, request.num_prompt_tokens)
    if params.min_tokens:
        mask = without(mask, request.stop_token_ids | request.eos_token_ids)
    if not mask.any():
        raise InputError(f"request {request.request_id}", dead_end(request), "allow more tokens")
    return made


def dead_end(request: Request) -> str:
    """Return an error message that names the parameters which together allow no token."""
    params = request.params
    given = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_token_ids),
        "structured_outputs": request.constraint is not None,
        "min_tokens": params.min_tokens > 0,
    }
    names = [name for name, is_given in given.items() if is_given]
    count = len(request.token_ids) - request.num_prompt_tokens
    return f"{', '.join(names)}: after {count} tokens of output no token is allowed"
