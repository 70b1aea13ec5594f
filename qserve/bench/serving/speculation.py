"""Figures of speculative decoding in a run, from the server's /metrics. Loads no torch."""

import re
from collections.abc import Mapping
from typing import Any

from qserve.bench.serving.http_client import HttpClient, HttpFailure

COUNTER = re.compile(
    r"^\w+:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)"
    r"(?:_total)?(\{[^}]*\})? ([0-9.e+-]+)$",
    re.MULTILINE,
)
POSITION = re.compile(r'position="(\d+)"')

Counts = dict[tuple[str, int], float]  # (name of a counter, position or -1) -> value


async def speculation_counts(http: HttpClient) -> Counts:
    """Read the counters, summed over all engines; {} if the server has none."""
    try:
        code, body = await http.request("GET", "/metrics")
    except HttpFailure:
        return {}
    return read_counts(body.decode(errors="replace")) if code == 200 else {}


def read_counts(page: str) -> Counts:
    """Parse the counters in a page of Prometheus' text format."""
    counts: Counts = {}
    for name, labels, value in COUNTER.findall(page):
        position = POSITION.search(labels)
        key = (name, int(position[1]) if position else -1)
        counts[key] = counts.get(key, 0.0) + float(value)
    return counts


def speculation_result(before: Counts, after: Counts) -> Mapping[str, Any]:
    """Return the result of a run with vLLM's keys; {} if nothing was drafted.

    `before` and `after` are the counters before and after the run.
    """
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts, tokens = grown.get(("drafts", -1), 0), grown.get(("draft_tokens", -1), 0)
    accepted = grown.get(("accepted_tokens", -1), 0)
    if not drafts or not tokens:
        return {}
    positions = sorted(each for name, each in grown if name == "accepted_tokens_per_pos")
    return {
        "spec_decode_acceptance_rate": 100 * accepted / tokens,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": int(drafts),
        "spec_decode_draft_tokens": int(tokens),
        "spec_decode_accepted_tokens": int(accepted),
        "spec_decode_per_position_acceptance_rates": [
            grown["accepted_tokens_per_pos", each] / drafts for each in positions
        ],
    }
