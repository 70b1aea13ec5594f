"""`qserve bench sweep plot | plot_pareto`: plot results of `bench serve`. Loads no torch."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from formats.errors import CHECK_ACCESS, InputError, one_line
from qserve.bench.pyplot import import_pyplot
from qserve.bench.serving.sweep_settings import PlotSettings

DEFAULT_Y = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms")


def bench_plot(results: str, settings: PlotSettings) -> int:
    """Run `bench sweep plot`: plot each key of --y over --x."""
    rows = read_results(results)
    asked = settings.y or DEFAULT_Y
    keys = [key for key in asked if any(key in row for row in rows)]
    if not keys:
        there = sorted({key for row in rows for key, value in row.items() if is_number(value)})
        raise InputError(
            "--y", f"no result has {' or '.join(asked)}", f"choose among {', '.join(there)}"
        )
    pyplot = import_pyplot("a plot")
    figure, axes = pyplot.subplots(1, len(keys), figsize=(6 * len(keys), 4), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for name, points in curves(rows, settings.by, settings.x, key).items():
            axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_xlabel(settings.x)
        axis.set_ylabel(key)
        axis.set_ylim(bottom=0)
        axis.legend()
    return _save(pyplot, figure, settings.output)


def bench_plot_pareto(results: str, settings: PlotSettings) -> int:
    """Run `bench sweep plot_pareto`: plot output tokens/s per GPU over tokens/s per user."""
    rows, pyplot = read_results(results), import_pyplot("a plot")
    points = pareto_points(rows, settings.gpus)
    if not points:
        raise InputError(
            results,
            "requires results with median_tpot_ms and output_throughput",
            "give a folder that `qserve bench sweep serve` wrote",
        )
    figure, axis = pyplot.subplots(figsize=(7, 5))
    axis.scatter(*zip(*points, strict=True))
    # A marker makes a frontier of only one point visible too.
    style = {"color": "tab:orange", "marker": "o"}
    axis.plot(*zip(*frontier(points), strict=True), label="Pareto frontier", **style)
    axis.set_xlabel("output tokens/s per user (1 / median TPOT)")
    axis.set_ylabel("output tokens/s per GPU")
    axis.legend()
    return _save(pyplot, figure, settings.output)


def read_results(path: str) -> list[dict[str, Any]]:
    """Read the results of a sweep, of a folder, or of one file. Raises InputError."""
    place = Path(path)
    if place.is_dir():
        whole = place / "summary.json"
        files = [whole] if whole.is_file() else sorted(place.glob("*.json"))
    else:
        files = [place]
    rows: list[dict[str, Any]] = []
    try:
        for file in files:
            found = json.loads(file.read_text(encoding="utf-8"))
            rows += found if isinstance(found, list) else [found]
    except (OSError, ValueError) as error:
        raise InputError(path, f"cannot be read: {one_line(error)}", CHECK_ACCESS) from None
    if not rows:
        raise InputError(
            path, "contains no result", "give the folder of one sweep, such as results/DATE"
        )
    return rows


def curves(
    rows: Sequence[Mapping[str, Any]], by: str, x: str, y: str
) -> dict[str, list[tuple[float, float]]]:
    """Return a line for each value of `by`, as points in order of x.

    Rows without both numbers are left out.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        try:
            point = float(row[x]), float(row[y])
        except (KeyError, TypeError, ValueError):
            continue
        if point[0] != float("inf"):
            found[str(row.get(by) or row.get("backend") or "")].append(point)
    if not found:
        raise InputError(
            f"--x {x}",
            f"no result has a number for this key and for {y}",
            "give another key of the results as --x",
        )
    return {name: sorted(points) for name, points in found.items()}


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def pareto_points(rows: Sequence[Mapping[str, Any]], gpus: int) -> list[tuple[float, float]]:
    """Return (tokens/s per user, tokens/s per GPU) of each result that has both."""
    return [
        (1000 / row["median_tpot_ms"], row["output_throughput"] / gpus)
        for row in rows
        if row.get("median_tpot_ms") and row.get("output_throughput")
    ]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other point exceeds in both values, ordered by the first value."""
    found: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found[::-1]


def _save(pyplot: Any, figure: Any, path: str) -> int:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"Wrote {path}")
    return 0
