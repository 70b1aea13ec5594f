"""Serving metrics: computed from request records, with vLLM's JSON keys and table. Loads no torch.

These are measured for each successful request, by the client's clock:
- TTFT: time from sending the request to the first chunk with tokens. A wait for --max-concurrency
  does not count.
- ITL: times between chunks with tokens, of all requests together. A chunk may have several tokens.
- TPOT: (E2EL - TTFT) / (output tokens - 1). A request of one token has none; for goodput it is 0.
- E2EL: time from sending the request to the last chunk.
Throughputs are divided by the time from the first send to the last chunk of all requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from qserve.bench.statistics import deviation, mean, median, percentiles

WIDTH = 50
TITLE = "Serving Benchmark Result"
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds of the same clock."""

    prompt_len: int  # in tokens
    start: float
    output_len: int = 0  # in tokens
    token_times: list[float] = field(default_factory=list)  # time of each chunk with tokens
    end: float = 0.0
    text: str = ""
    error: str = ""  # reason for the failure; "": it succeeded

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.start if self.token_times else 0.0

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0

    @property
    def itls(self) -> list[float]:
        times = self.token_times
        return [after - before for before, after in zip(times, times[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)  # no slots, because cached properties need a __dict__
class ServeMetrics:
    """The measurements of a run."""

    records: Sequence[RequestRecord]
    duration: float  # in seconds

    @cached_property
    def successful(self) -> list[RequestRecord]:
        return [record for record in self.records if not record.error]

    @cached_property
    def seconds(self) -> dict[str, list[float]]:
        """A table: metric -> its values."""
        return {
            "ttft": [record.ttft for record in self.successful],
            "tpot": [record.tpot for record in self.successful if record.output_len > 1],
            "itl": [gap for record in self.successful for gap in record.itls],
            "e2el": [record.latency for record in self.successful],
        }

    def goodput(self, limits_ms: Mapping[str, float]) -> float:
        """Return the number of requests per second that meet all limits."""
        good = 0
        for record in self.successful:
            values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.latency}
            good += all(1e3 * values[name] <= limit for name, limit in limits_ms.items())
        return self._rate(good)

    @cached_property
    def peaks(self) -> tuple[float, int]:
        """Maximum numbers of output tokens and of requests in progress within one second."""
        if not self.successful:
            return 0.0, 0
        begin = min(record.start for record in self.successful)
        size = int(max(record.end for record in self.successful) - begin) + 2
        tokens, changes = np.zeros(size), np.zeros(size + 1)
        for record in self.successful:
            if record.token_times:
                each = record.output_len / len(record.token_times)
                seconds = (np.array(record.token_times) - begin).astype(int)
                np.add.at(tokens, seconds, each)
            changes[int(record.start - begin)] += 1
            changes[int(record.end - begin) + 1] -= 1
        return float(tokens.max()), int(np.cumsum(changes).max())

    def to_dict(
        self,
        *,
        metrics: Sequence[str],
        wanted: Sequence[float],
        limits_ms: Mapping[str, float] | None = None,
    ) -> dict[str, Any]:
        """Return the result with vLLM's keys, with times in milliseconds."""
        num_input = sum(record.prompt_len for record in self.successful)
        num_output = sum(record.output_len for record in self.successful)
        peak_tokens, peak_requests = self.peaks
        found: dict[str, Any] = {
            "duration": self.duration,
            "completed": len(self.successful),
            "failed": len(self.records) - len(self.successful),
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": self._rate(len(self.successful)),
            "request_goodput": self.goodput(limits_ms) if limits_ms else None,
            "output_throughput": self._rate(num_output),
            "total_token_throughput": self._rate(num_input + num_output),
            "max_output_tokens_per_s": peak_tokens,
            "max_concurrent_requests": peak_requests,
        }
        for name in metrics:
            values = [1e3 * value for value in self.seconds[name]]
            found[f"mean_{name}_ms"] = mean(values)
            found[f"median_{name}_ms"] = median(values)
            found[f"std_{name}_ms"] = deviation(values)
            for percentile, value in percentiles(values, wanted).items():
                found[f"p{percentile}_{name}_ms"] = value
        return found

    def details(self) -> dict[str, list]:
        """Return vLLM's keys for --save-detailed: values of every request, also of failed ones."""
        return {
            "input_lens": [record.prompt_len for record in self.records],
            "output_lens": [record.output_len for record in self.records],
            "ttfts": [record.ttft for record in self.records],
            "itls": [record.itls for record in self.records],
            "latencies": [0.0 if record.error else record.latency for record in self.records],
            "start_times": [record.start for record in self.records],
            "generated_texts": [record.text for record in self.records],
            "errors": [record.error for record in self.records],
        }

    def _rate(self, count: float) -> float:
        return count / self.duration if self.duration > 0 else 0.0


def table(
    result: Mapping[str, Any], metrics: Sequence[str], wanted: Sequence[float], title: str = TITLE
) -> str:
    """Format a result as a table like vLLM's."""
    rows = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if result.get("max_concurrency") is not None:
        rows.append(("Maximum request concurrency:", result["max_concurrency"]))
    if result.get("request_rate") not in (None, "inf"):
        rows.append(("Request rate configured (RPS):", result["request_rate"]))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result.get("request_goodput") is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(result["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [f"{f' {title} ':=^{WIDTH}}"]
    lines += [_row(*row) for row in rows]
    for name in metrics:
        short, full = TITLES[name]
        lines.append(f"{full:-^{WIDTH}}")
        lines.append(_row(f"Mean {short} (ms):", result[f"mean_{name}_ms"]))
        lines.append(_row(f"Median {short} (ms):", result[f"median_{name}_ms"]))
        for percentile in wanted:
            key = f"p{percentile:g}_{name}_ms"
            lines.append(_row(f"P{percentile:g} {short} (ms):", result[key]))
    if "spec_decode_acceptance_rate" in result:
        lines.append(f"{'Speculative Decoding':-^{WIDTH}}")
        for text, key in SPECULATION_ROWS:
            lines.append(_row(text, result[key]))
        for place, rate in enumerate(result["spec_decode_per_position_acceptance_rates"]):
            lines.append(_row(f"  Position {place}:", 100 * rate))
    lines.append("=" * WIDTH)
    return "\n".join(lines)


SPECULATION_ROWS = (
    ("Acceptance rate (%):", "spec_decode_acceptance_rate"),
    ("Acceptance length:", "spec_decode_acceptance_length"),
    ("Drafts:", "spec_decode_num_drafts"),
    ("Draft tokens:", "spec_decode_draft_tokens"),
    ("Accepted tokens:", "spec_decode_accepted_tokens"),
)


def _row(text: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{text:<40} {shown:<10}"
