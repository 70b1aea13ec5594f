"""The layers of a run: solve each layer or read it from the journal, then write its codes."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from calibrate.layer import FinishedLayer, load_transforms, quantize_layer
from calibrate.results.output import Output
from calibrate.resume.journal import Journal
from calibrate.run.prepare import Run
from calibrate.solvers.solving import LayerContext, LayerState
from formats.files.channel_factors import ChannelFactors

if TYPE_CHECKING:  # it loads transformers
    from calibrate.calibration.stream import Stream

log = logging.getLogger(__name__)


def solve_layers(
    run: Run, stream: "Stream | None", output: Output, journal: Journal, bar: tqdm
) -> None:
    """Write the codes of all layers in order, solving those that are not in the journal."""
    model = run.model
    for layer in range(model.num_layers):
        show = partial(advance, bar, f"layer {layer + 1}/{model.num_layers}")
        original = model.layer(layer, run.devices.first)
        prefix = model.layer_map.prefix(layer)
        context = replace(
            run.context, layer=layer, prefix=prefix, notes=[], factors=ChannelFactors()
        )
        state = load_transforms(original, run.recipe, context)
        digest = model.layer_digests[layer]
        finished = journal.read(layer, run.devices.first, digest)
        if finished is None:
            finished = _solve(run, stream, original, state, context, show)
            journal.write(layer, finished, digest)
        else:
            show("found finished", len(finished.packed))
            if stream is not None:
                stream.advance_reference(layer, state)
        kv_scales = None
        if stream is not None:
            with run.clock("next inputs"):
                kv_scales = stream.advance(layer, original, finished)
        with run.clock("writing"):
            output.add_layer(prefix, finished, model)
            if kv_scales is not None:
                output.add_kv_scales(prefix, kv_scales)
        _log_layer(prefix, finished)


def advance(bar: tqdm, where: str, what: str, count: int = 1) -> None:
    """Show the current work in the progress bar, and count linears."""
    bar.set_description(f"{where} {what}")
    bar.update(count)


def _solve(
    run: Run,
    stream: "Stream | None",
    original: LayerState,
    state: LayerState,
    context: LayerContext,
    show: Callable[..., None],
) -> FinishedLayer:
    """Solve one layer. `state`: the layer after the transforms that need no data."""
    layer, recipe, clock = context.layer, run.recipe, run.clock
    with clock("statistics"):
        show("running the calibration data", 0)
        statistics = {}
        if stream is not None and _reads_data(run, context.prefix):
            statistics = stream.statistics(layer, state)
    with clock("solving"):
        finished = quantize_layer(
            original,
            state,
            statistics,
            schemes=run.schemes,
            recipe=recipe,
            context=context,
            input_scales=run.settings.input_scales,
            before_linear=show,
            devices=run.devices,
        )
    if stream is not None:
        with clock("next inputs"):
            stream.advance_reference(layer, state)
    if recipe.tuning is not None:
        with clock("tuning"):
            show("tuning", 0)
            tuned = stream.tune(layer, state, finished, recipe.tuning, run.settings.seed)
            finished = tuned.measured_again(state, statistics)
    return finished


def _reads_data(run: Run, prefix: str) -> bool:
    """Return True if a layer's statistics are needed.

    They are if one of its linears is quantized, or if a transform uses statistics.
    """
    changes = any(transform.on_statistics is not None for transform in run.recipe.transforms)
    return changes or any(name.startswith(f"{prefix}.") for name in run.schemes)


def _log_layer(prefix: str, finished: FinishedLayer) -> None:
    for note in finished.notes:
        log.warning("%s: %s", prefix, note)
    reports = finished.reports
    if not reports:
        log.info("%s: left in float", prefix)
        return
    worst = max(reports, key=lambda r: r.output_error or r.relative_error)
    kind = "weight" if worst.output_error is None else "output"
    error = 100 * (worst.output_error or worst.relative_error)
    log.info("%s: largest %s error %.2f %%, of %s", prefix, kind, error, worst.name)
    for report in reports:
        for note in report.notes:
            log.warning("%s: %s", report.name, note)
