"""Heat maps of `bench forward`: microseconds by batch size or new tokens, and by context length."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from formats.errors import InputError
from qserve.bench.pyplot import import_pyplot


def draw_heat_maps(
    cases: Sequence[dict[str, Any]], path: str, **grids: tuple[list[int], list[int]]
) -> None:
    """Draw a heat map for each of `grids`: "decode" or "prefill" -> (batches or tokens, contexts).

    Grids without a case are left out. Raises InputError if there is nothing to draw, or if
    matplotlib is not installed.
    """
    pyplot = import_pyplot("--plot")
    times = {case["case"]: case["median_us"] for case in cases}
    maps = {
        kind: np.array([[times.get(f"{kind}-{x}x{y}", np.nan) for x in xs] for y in ys])
        for kind, (xs, ys) in grids.items()
    }
    maps = {kind: values for kind, values in maps.items() if not np.isnan(values).all()}
    if not maps:
        raise InputError(
            "--plot", "requires --decode-batches or --prefill-tokens", "add one of these flags"
        )
    figure, axes = pyplot.subplots(1, len(maps), figsize=(7 * len(maps), 5), squeeze=False)
    for axis, (kind, values) in zip(axes[0], maps.items(), strict=True):
        xs, ys = grids[kind]
        image = axis.imshow(np.log(values), aspect="auto", origin="lower")
        axis.set_xticks(range(len(xs)), xs)
        axis.set_yticks(range(len(ys)), ys)
        axis.set_xlabel("requests" if kind == "decode" else "new tokens")
        axis.set_ylabel("tokens in context")
        axis.set_title(f"{kind}, microseconds")
        for (y, x), value in np.ndenumerate(values):
            # The colors of the higher values are light.
            color = "black" if image.norm(np.log(value)) > 0.5 else "white"
            axis.text(x, y, f"{value:.0f}", ha="center", va="center", color=color, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
