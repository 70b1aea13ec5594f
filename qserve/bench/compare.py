"""`qserve bench compare`: compare two results of a benchmark. Loads no torch."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from formats.errors import InputError, one_line
from qserve.bench.steps.forward_settings import CompareSettings

# keys whose numbers are not compared: they describe the setup of a run, or are single samples
SETTINGS = {"machine", "engine", "requests", "date", "num_requests", "num_tokens", "samples_us"}
# keys that should be equal in both results
IDENTITY = ("model_id", "num_prompts", "request_rate", "max_concurrency")


def bench_compare(a: str, settings: CompareSettings) -> int:
    """Run `bench compare`: print the settings that differ, then the ratio of each number."""
    first, second = _read(a), _read(settings.b)
    for key in IDENTITY:
        if first.get(key) != second.get(key):
            print(f"different {key}: {first.get(key)} and {second.get(key)}")
    for key in ("machine", "engine"):
        for name in sorted((first.get(key) or {}).keys() & (second.get(key) or {}).keys()):
            if first[key][name] != second[key][name]:
                print(f"different {name}: {first[key][name]} and {second[key][name]}")
    before, after = dict(_numbers(first)), dict(_numbers(second))
    shared = [key for key in before if key in after]
    if not shared:
        raise InputError(
            settings.b, f"shares no number with {a}", "give two results of the same command"
        )
    print(f"{'':<44}{'A':>14}{'B':>14}{'B / A':>9}")
    for key in shared:
        ratio = f"{after[key] / before[key]:.3f}" if before[key] else "-"
        within = _within_spread(key, before, after)
        print(f"{key:<44}{before[key]:>14.2f}{after[key]:>14.2f}{ratio:>9}{within}")
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            path,
            f"expected the JSON file of a result: {one_line(error)}",
            "give the result file of a `qserve bench` command",
        ) from None
    if not isinstance(found, dict):
        raise InputError(
            path,
            f"expected a JSON object, found {type(found).__name__}",
            "give the result file of a `qserve bench` command",
        )
    return found


def _numbers(content: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number of a result with its path, which begins with the name of its case."""
    if isinstance(content, dict):
        for key, value in content.items():
            if key not in SETTINGS:
                yield from _numbers(value, f"{path}.{key}" if path else key)
    elif isinstance(content, list):
        for value in content:
            if isinstance(value, dict) and "case" in value:
                yield from _numbers(value, value["case"])
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield path, float(content)


def _within_spread(key: str, before: dict[str, float], after: dict[str, float]) -> str:
    """Return a remark if two medians differ by at most the spread of their samples, else ""."""
    case, _, name = key.rpartition(".")
    spread = f"{case}.spread_pct"
    if name != "median_us" or spread not in before or not before[key]:
        return ""
    percent = 100 * abs(after[key] / before[key] - 1)
    return "  within the spread" if percent <= max(before[spread], after[spread]) else ""
