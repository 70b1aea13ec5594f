"""Text report of a trace: time by operator class, gaps, kernels; or difference of two traces."""

import json
from collections.abc import Mapping
from pathlib import Path

from qserve.profile.chrome_trace import TraceSummary, summarize

NUM_KERNELS = 15


def write_report(trace: str | Path, floors_us: Mapping[str, float] | None = None) -> str:
    """Summarize a trace: write a JSON file next to it, and return the report as text.

    `floors_us`: operator class -> lower bound of its time per step, if known.
    """
    summary = summarize(trace)
    target = Path(str(trace).removesuffix(".gz").removesuffix(".json") + ".summary.json")
    content = summary.to_dict() | ({"floors_us": dict(floors_us)} if floors_us else {})
    target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return f"{to_text(summary, floors_us)}\nTrace: {trace}\nSummary: {target}"


def to_text(summary: TraceSummary, floors_us: Mapping[str, float] | None = None) -> str:
    """Return the report as text. `floors_us`: class -> lower bound of its time per step."""
    floors_us = floors_us or {}
    num_steps = max(1, len(summary.step_names))
    where = "GPU" if summary.on_device else "CPU"
    gap_share = 100 * summary.gap_us / summary.span_us if summary.span_us else 0.0
    lines = [
        f"{len(summary.step_names)} steps, span {summary.span_us / 1e3:.3f} ms,"
        f" {where} busy {summary.busy_us / 1e3:.3f} ms, gap {summary.gap_us / 1e3:.3f} ms"
        f" ({gap_share:.1f} %)"
    ]
    if summary.step_gaps_us:
        ordered = sorted(summary.step_gaps_us)
        lines.append(
            f"between two steps: median {ordered[len(ordered) // 2]:.1f} us,"
            f" at most {ordered[-1]:.1f} us"
        )
    lines.append(f"{'class':<16}{'us':>12}{'%':>8}{'us/step':>12}{'calls':>8}{'of floor':>10}")
    for name, (us, calls) in summary.classes.items():
        floor = floors_us.get(name)
        near = f"{100 * floor * num_steps / us:.0f} %" if floor and us else ""
        lines.append(
            f"{name:<16}{us:>12.1f}{100 * us / summary.span_us:>8.1f}"
            f"{us / num_steps:>12.1f}{calls:>8}{near:>10}".rstrip()
        )
    lines.append(
        f"{'gap':<16}{summary.gap_us:>12.1f}{gap_share:>8.1f}{summary.gap_us / num_steps:>12.1f}"
    )
    lines.append("")
    lines.append(f"{'us':>12}{'calls':>8}  {'class':<14}kernel")
    for kernel in summary.kernels[:NUM_KERNELS]:
        lines.append(f"{kernel.us:>12.1f}{kernel.calls:>8}  {kernel.kind:<14}{kernel.name[:60]}")
    return "\n".join(lines)


def difference(a: TraceSummary, b: TraceSummary) -> str:
    """Return a table of the kernels of two traces: time in `b` minus time in `a`, largest first."""
    times = [{each.name: each for each in summary.kernels} for summary in (a, b)]
    rows = []
    for name in times[0].keys() | times[1].keys():
        before, after = (of.get(name) for of in times)
        us = [0.0 if each is None else each.us for each in (before, after)]
        calls = [0 if each is None else each.calls for each in (before, after)]
        rows.append((us[1] - us[0], *us, *calls, name))
    rows.sort(key=lambda row: (-abs(row[0]), row[-1]))
    lines = [f"{'delta us':>12}{'A us':>12}{'B us':>12}{'A calls':>9}{'B calls':>9}  kernel"]
    lines += [
        f"{delta:>+12.1f}{us_a:>12.1f}{us_b:>12.1f}{calls_a:>9}{calls_b:>9}  {name[:60]}"
        for delta, us_a, us_b, calls_a, calls_b, name in rows[: 2 * NUM_KERNELS]
    ]
    lines.append(f"{b.span_us - a.span_us:>+12.1f}{a.span_us:>12.1f}{b.span_us:>12.1f}  span")
    return "\n".join(lines)
