"""Render the report as one self-contained HTML page with tables and inline SVG plots."""

import re
from collections.abc import Callable, Sequence
from html import escape

from calibrate.results.report import LinearReport, QuantizationReport
from formats.quality.record import measured_text
from formats.table import count_text, size_text

REPORT_HTML = "quantization_report.html"
WIDTH, HEIGHT, MARGIN = 900, 240, 60
MAX_LAYER_LABELS = 24  # more labels would overlap
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
Series = dict[str, dict[int, float]]  # line of a plot -> layer -> value
Groups = dict[str, dict[int, list[LinearReport]]]  # name within a layer -> layer -> experts
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#1f2937}
table{border-collapse:collapse;font-size:13px}td,th{padding:2px 10px;text-align:right}
td:first-child,th:first-child{text-align:left}tr:nth-child(even){background:#f3f4f6}
svg{width:100%;height:auto}text{font:11px system-ui,sans-serif;fill:#4b5563}
.warning{background:#fef3c7;padding:.4em .8em;border-left:4px solid #d97706}
"""


def to_html(report: QuantizationReport) -> str:
    """Return the HTML page of a report."""
    linears = _by_place(report.linears)
    with_data = any(linear.output_error is not None for linear in report.linears)
    parts = [
        f"<h1>{escape(report.scheme)} by {escape(report.recipe)}</h1>",
        f"<p>{escape(report.source)}: {count_text(len(report.linears), 'linear')} as"
        f" {escape(report.format)},"
        f" {size_text(report.bytes_before)} to {size_text(report.bytes_after)},"
        f" {report.bits_per_weight:.2f} bits per quantized weight, {report.seconds:.1f} s</p>",
        *(f'<p class="warning">{escape(text)}</p>' for text in report.warnings),
        *(
            f'<p class="warning">{escape(linear.name)}: {escape(note)}</p>'
            for linear in report.linears
            for note in linear.notes
        ),
    ]
    if report.quality:
        parts.append(f"<p>Held-out text: {escape(measured_text(report.quality))}</p>")
    errors = _mean_plot(linears, _percent("relative_error"))
    parts.append(_section("Weight error per linear, %", errors))
    if with_data:
        parts.append(
            _section("Output error per linear, %", _mean_plot(linears, _percent("output_error")))
        )
    parts.append(_section("Largest weight per layer", _largest_plot(linears, "weight_absmax")))
    if with_data:
        parts.append(_section("Largest input per layer", _largest_plot(linears, "input_absmax")))
    if report.kv_cache is not None:
        scales: Series = {}
        for name, scale in report.kv_scales.items():
            layer, local = _place(name)
            scales.setdefault(local.rpartition(".")[2], {})[layer] = scale
        parts.append(
            _section(f"Scales of the {report.kv_cache} KV cache per layer", line_plot(scales))
        )
    bits = _mean_plot(linears, lambda r: 8 * r.num_bytes / (r.shape[0] * r.shape[1]))
    parts.append(_section("Bits per weight", bits))
    if report.seconds_by_stage:
        parts.append(_section("Seconds by stage", bar_plot(report.seconds_by_stage)))
    parts += [_linears(report.linears), _repeat(report)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>Quantization report</title><style>{STYLE}</style></head><body>"
        + "\n".join(parts)
        + "</body></html>\n"
    )


def line_plot(series: Series) -> str:
    """Plot one line per series over the layers, from 0 up. Hovering shows a point's value."""
    top = max((value for values in series.values() for value in values.values()), default=0) or 1
    count = 1 + max((layer for values in series.values() for layer in values), default=0)
    step = (WIDTH - 2 * MARGIN) / max(count - 1, 1)
    shapes = [_axis(top, y) for y in (0, 0.5, 1)]
    below = _height(0) + 16
    shapes += [
        f'<text x="{MARGIN + i * step:.1f}" y="{below}" text-anchor="middle">{i}</text>'
        for i in range(0, count, max(1, -(-count // MAX_LAYER_LABELS)))
    ]
    for number, (name, values) in enumerate(series.items()):
        color = COLORS[number % len(COLORS)]
        points = {i: (MARGIN + i * step, _height(value / top)) for i, value in values.items()}
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points.values())
        shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}">'
            f"<title>{escape(name)}, layer {i}: {values[i]:.4g}</title></circle>"
            for i, (x, y) in points.items()
        ]
        if number < len(COLORS):
            x = MARGIN + number * (WIDTH - 2 * MARGIN) / len(COLORS)
            shapes.append(f'<text x="{x:.0f}" y="14" style="fill:{color}">{escape(name)}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(shapes)}</svg>'


def bar_plot(values: dict[str, float]) -> str:
    """Plot one horizontal bar per name."""
    top = max(values.values()) or 1
    shapes = []
    for number, (name, value) in enumerate(values.items()):
        y, width = 22 * number, (WIDTH - 260) * value / top
        shapes.append(
            f'<text x="0" y="{y + 14}">{escape(name)}</text>'
            f'<rect x="150" y="{y + 2}" width="{width:.1f}" height="16" fill="{COLORS[0]}"/>'
            f'<text x="{156 + width:.1f}" y="{y + 14}">{value:.2f}</text>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {22 * len(values)}">{"".join(shapes)}</svg>'


def _height(share: float) -> float:
    return HEIGHT - 20 - share * (HEIGHT - 50)


def _axis(top: float, share: float) -> str:
    y = _height(share)
    return (
        f'<line x1="{MARGIN}" y1="{y}" x2="{WIDTH - MARGIN}" y2="{y}" stroke="#e5e7eb"/>'
        f'<text x="{MARGIN - 6}" y="{y + 4}" text-anchor="end">{top * share:.3g}</text>'
    )


def _place(name: str) -> tuple[int, str]:
    """Return the layer of a module, and its name there; experts of a layer have one name."""
    layer, _, local = name.rpartition("layers.")[2].partition(".")
    if not layer.isdecimal():  # outside of layers, such as the head
        return 0, name
    return int(layer), re.sub(r"\bexperts\.\d+\.", "experts.", local)


def _by_place(linears: Sequence[LinearReport]) -> Groups:
    """Return the linears by name within their layer, and by layer."""
    found: Groups = {}
    for linear in linears:
        layer, local = _place(linear.name)
        found.setdefault(local, {}).setdefault(layer, []).append(linear)
    return found


def _percent(field: str) -> Callable[[LinearReport], float]:
    return lambda linear: 100 * (getattr(linear, field) or 0.0)


def _mean_plot(groups: Groups, value: Callable[[LinearReport], float]) -> str:
    """Plot a value per layer, the mean of the layer's experts."""
    return _plot(groups, lambda group: sum(map(value, group)) / len(group))


def _largest_plot(groups: Groups, field: str) -> str:
    """Plot a field per layer, the largest of the layer's experts."""
    return _plot(groups, lambda group: max(getattr(r, field) or 0.0 for r in group))


def _plot(groups: Groups, of_layer: Callable[[list[LinearReport]], float]) -> str:
    return line_plot(
        {
            local: {layer: of_layer(group) for layer, group in layers.items()}
            for local, layers in groups.items()
        }
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>{content}"


def _linears(linears: Sequence[LinearReport]) -> str:
    rows = "".join(
        f"<tr><td>{escape(r.name)}</td><td>{r.shape[0]} x {r.shape[1]}</td>"
        f"<td>{100 * r.relative_error:.2f} %</td>"
        f"<td>{'-' if r.output_error is None else f'{100 * r.output_error:.2f} %'}</td>"
        f"<td>{'-' if r.tokens is None else r.tokens}</td><td>{r.seconds:.2f} s</td></tr>"
        for r in linears
    )
    header = "<tr><th>linear</th><th>N x K</th><th>weight error</th><th>output error</th>"
    return f"<h2>Linears</h2><table>{header}<th>tokens</th><th>time</th></tr>{rows}</table>"


def _repeat(report: QuantizationReport) -> str:
    facts = {"model sha256": report.source_sha256, **(report.calibration or {}), **report.versions}
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<h2>How to reproduce</h2><table>{rows}</table>"
