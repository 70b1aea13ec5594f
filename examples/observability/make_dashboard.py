"""Write the Grafana dashboard into this folder: `python examples/observability/make_dashboard.py`.

The panels are rows of a table. `--prefix vllm` is for servers started with --metrics-prefix vllm.
"""

import argparse
import json
from pathlib import Path

QUANTILES = (0.5, 0.9, 0.99)
SELECT = '{model_name=~"$model", instance=~"$instance"}'


def rate(name: str) -> str:
    return f"sum(rate(PREFIX:{name}{SELECT}[$__rate_interval]))"


def total(name: str) -> str:
    return f"sum(PREFIX:{name}{SELECT})"


def mean(name: str) -> str:
    return f"{rate(f'{name}_sum')} / {rate(f'{name}_count')}"


def quantiles(name: str) -> dict[str, str]:
    return {
        f"p{quantile * 100:g}": (
            f"histogram_quantile({quantile}, sum by (le)"
            f" (rate(PREFIX:{name}_bucket{SELECT}[$__rate_interval])))"
        )
        for quantile in QUANTILES
    }


# title, unit, legend: query
PANELS: list[tuple[str, str, dict[str, str]]] = [
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Time between tokens", "s", quantiles("inter_token_latency_seconds")),
    ("Whole requests", "s", quantiles("e2e_request_latency_seconds")),
    ("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    (
        "Tokens per second",
        "short",
        {"prompt": rate("prompt_tokens_total"), "generated": rate("generation_tokens_total")},
    ),
    (
        "Outputs",
        "short",
        {"running": total("num_requests_running"), "waiting": total("num_requests_waiting")},
    ),
    ("KV pages in use", "percentunit", {"share": f"max(PREFIX:kv_cache_usage_perc{SELECT})"}),
    (
        "Prompt tokens from the prefix cache",
        "percentunit",
        {"share": f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}"},
    ),
    (
        "How outputs end, per second",
        "short",
        {
            "{{finished_reason}}": "sum by (finished_reason)"
            f" (rate(PREFIX:request_success_total{SELECT}[$__rate_interval]))"
        },
    ),
    (
        "Answers by status, per second",
        "short",
        {
            "{{status}}": "sum by (status)"
            ' (rate(PREFIX:http_requests_total{instance=~"$instance"}[$__rate_interval]))'
        },
    ),
    (
        "Where a request's time goes, mean",
        "s",
        {
            "queue": mean("request_queue_time_seconds"),
            "prompt": mean("request_prefill_time_seconds"),
            "tokens": mean("request_decode_time_seconds"),
        },
    ),
    (
        "Tokens of a request, mean",
        "short",
        {
            "prompt": mean("request_prompt_tokens"),
            "generated": mean("request_generation_tokens"),
        },
    ),
    ("Tokens of a step", "short", quantiles("iteration_tokens_total")),
    (
        "Drafts that become output",
        "percentunit",
        {
            "share": f"{rate('spec_decode_num_accepted_tokens_total')}"
            f" / {rate('spec_decode_num_draft_tokens_total')}"
        },
    ),
    (
        "Tokens of a verify",
        "short",
        {
            "mean": f"1 + {rate('spec_decode_num_accepted_tokens_total')}"
            f" / {rate('spec_decode_num_drafts_total')}"
        },
    ),
    (
        "Preemptions and refusals, per second",
        "short",
        {
            "preemptions": rate("num_preemptions_total"),
            "refused": rate("admission_rejections_total"),
        },
    ),
]


def dashboard(prefix: str) -> dict:
    """Dashboard in Grafana's import format."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels = []
    for number, (title, unit, queries) in enumerate(PANELS):
        targets = [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": query.replace("PREFIX", prefix),
                "legendFormat": legend,
            }
            for index, (legend, query) in enumerate(queries.items())
        ]
        panels.append(
            {
                "id": number + 1,
                "title": title,
                "type": "timeseries",
                "datasource": source,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    metric = f"{prefix}:num_requests_running"
    variables = [
        {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
        *(
            {
                "name": name,
                "label": label,
                "type": "query",
                "datasource": source,
                "query": f"label_values({metric}, {field})",
                "refresh": 2,
                "multi": True,
                "includeAll": True,
                "current": {"text": "All", "value": "$__all"},
            }
            for name, label, field in (
                ("model", "Model", "model_name"),
                ("instance", "Server", "instance"),
            )
        ),
    ]
    return {
        "title": f"{prefix} serving",
        "uid": f"{prefix}-serving",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefix", default="qserve", help="prefix of the metrics' names")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).with_name("grafana.json")
    )
    options = parser.parse_args()
    options.output.write_text(json.dumps(dashboard(options.prefix), indent=1) + "\n")


if __name__ == "__main__":
    main()
