"""Requests that come and end with drafts, in simulated time. Knows Depth, no engine.

As in an engine one step stays in flight, and a request that it may end waits for it.
"""

import random

from qserve.engine.runner.graphs.cuda_graphs import graph_sizes


def seconds_of(depth, step_seconds, num_requests, num_tokens, share, seed=0):
    """Simulated seconds until requests that arrive together have `num_tokens` tokens each.

    `step_seconds(size, rows of each, drafts)`: duration of a step, by the size of its graph.
    `share`: fraction of drafts that are accepted, given those before them.
    """
    rng, sizes = random.Random(seed), graph_sizes(num_requests)
    left, pending = [num_tokens] * num_requests, [0] * num_requests
    flight, num_drafts, total = None, 0, 0.0
    while True:
        going = [i for i, tokens in enumerate(left) if tokens > pending[i]]
        step = None
        if going:
            rows = 1 + num_drafts
            num_drafts = depth.choose(sum(tokens > 0 for tokens in left)).num_drafts
            size = next(each for each in sizes if each >= len(going))
            seconds = step_seconds(size, rows, num_drafts)
            total += seconds
            step = going, rows - 1, num_drafts, seconds
            for request in going:
                pending[request] += rows
        if flight is not None:
            done, judged, drafted, seconds = flight
            if judged == drafted:
                depth.observe_seconds(len(done), judged, seconds)
            for request in done:
                accepted = 0
                while accepted < judged and rng.random() < share:
                    accepted += 1
                if judged:
                    depth.observe(judged, accepted)
                left[request] -= 1 + accepted
                pending[request] -= 1 + judged
        elif step is None:
            return total
        flight = step


def times_without(depth, step_seconds, num_requests, num_tokens=127, share=0.795, seed=0):
    """Tokens a second of a second crowd of requests, over those without drafts."""
    for crowd in range(2):
        own_seed = 2 * seed + crowd
        found = seconds_of(depth, step_seconds, num_requests, num_tokens, share, own_seed)
    return num_tokens * step_seconds(num_requests, 1, 0) / found
