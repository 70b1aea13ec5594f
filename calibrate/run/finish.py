"""The end of a run: measure the quality, verify the files, write reports and publish the folder."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calibrate.digest import combined
from calibrate.quality.card import quality_record
from calibrate.results.model_card import CARD, RECIPE_FILE, model_card, recipe_text
from calibrate.results.output import Output
from calibrate.results.report import (
    REPORT,
    QuantizationReport,
    public_data,
    public_name,
    starved_warnings,
    tool_versions,
)
from calibrate.results.report_html import REPORT_HTML, to_html
from calibrate.results.verify import verify
from calibrate.run.prepare import Run
from calibrate.solvers.solving import LayerState
from formats.checkpoint import CheckpointReader, CheckpointWriter
from formats.compatibility.loads_in import Verdict
from formats.files.block import quantization_block
from formats.files.channel_factors import ChannelFactors, read_channel_factors
from formats.files.side_files import CHANNEL_FACTORS
from formats.inspection.inspect import inspect_checkpoint
from formats.plan import Plan
from formats.quality.checksums import checksums
from formats.quality.probe import NUM_TOKENS, Probe
from formats.quality.record import QUALITY
from formats.quant_config import BLOCK
from formats.scheme import microscaled_inputs

if TYPE_CHECKING:  # it loads transformers
    from calibrate.calibration.stream import Stream

NOT_REGROUPED = (
    "act-order: the groups of all linears have adjacent inputs anyway; written without act-order"
)


def finish(
    run: Run,
    model_tensors: LayerState,
    stream: "Stream | None",
    output: Output,
    writer: CheckpointWriter,
) -> QuantizationReport:
    """Measure, verify and publish the folder, and return the report.

    `model_tensors`: tensors outside of layers that a transform changed.
    """
    settings, clock = run.settings, run.clock
    with clock("quality"):
        quality, probe = _compare(run, model_tensors, stream)
    plan = run.plan
    if plan.act_order and not output.regrouped:
        plan = replace(plan, act_order=False)  # more programs load it without, and run it faster
    config = {
        **run.model.config,
        **_config_changes(run, model_tensors),
        **run.head_and_embedding.config_changes(),
    }
    block = quantization_block(plan.config(settings.quantizer), config)
    staged = writer.seal({**config, BLOCK: block}, side_files_from=run.model.folder)
    _write_factors(run, output, writer)
    if plan.layout.second_file is not None:
        writer.write_json(plan.layout.second_file, block)
    with clock("reading back"):
        verify(staged, output.digests, run.model, output.rewritten, config)
    verdicts = inspect_checkpoint(staged).loads_in
    report = _report(run, plan, model_tensors, output, quality, staged, verdicts)
    name = Path(settings.target).name
    card = model_card(report, verdicts, name, has_factors=bool(output.factors))
    writer.write_text(CARD, card)
    if settings.recorded is not None:
        writer.write_text(RECIPE_FILE, recipe_text(settings.recorded))
    writer.write_json(REPORT, report.to_dict())
    sums = checksums(CheckpointReader(staged), run.schemes)
    record = quality_record(report, probe, sums, settings.recorded, settings.target)
    writer.write_json(QUALITY, record)
    writer.write_text(REPORT_HTML, to_html(report))
    writer.publish()
    return report


def _write_factors(run: Run, output: Output, writer: CheckpointWriter) -> None:
    """Write the channel factors, multiplied by those of the source if it has any."""
    if output.factors:
        factors = read_channel_factors(run.model.folder) or ChannelFactors()
        factors.multiply_(output.factors)
        writer.write_bytes(CHANNEL_FACTORS, factors.to_bytes())


def _compare(
    run: Run, model_tensors: LayerState, stream: "Stream | None"
) -> tuple[dict[str, Any] | None, Probe | None]:
    """Measure the quality of the quantized model; also return logits for the server's check."""
    model, evaluation = run.model, run.evaluation
    if stream is None or evaluation is None:
        return None, None
    names = model.layer_map
    original = (model.get(names.last_norm), model.head())
    changed = original
    if model_tensors:
        changed = (model_tensors[names.last_norm], model_tensors[names.head])
    changed = (
        changed[0],
        run.head_and_embedding.head_of(changed[1], is_rewritten=bool(model_tensors)),
    )
    found = stream.agreement(original, changed, evaluation.given)
    logits_SV = stream.first_logits(*changed, NUM_TOKENS)
    probe = Probe.of(evaluation.ids_WS[0], logits_SV, exact=logits_SV.dtype == torch.float32)
    if any(microscaled_inputs(each) is not None for each in run.schemes.values()):
        probe = None  # these logits are of rounded inputs, which this project's engine lacks
    return evaluation.record(found), probe


def _report(
    run: Run,
    plan: Plan,
    model_tensors: LayerState,
    output: Output,
    quality: dict[str, Any] | None,
    staged: Path,
    verdicts: tuple[Verdict, ...],
) -> QuantizationReport:
    settings, model, ours = run.settings, run.model, run.identity
    digests = [ours["model"], *(model.layer_digests[i] for i in range(model.num_layers))]
    adapter = settings.adapter
    bits = settings.bits
    return QuantizationReport(
        source=public_name(settings.source),
        source_sha256=combined(digests),
        scheme=str(run.scheme) if bits is None else f"{run.scheme}, {bits} bits on the mean",
        recipe=run.recipe.name,
        format=plan.layout.name,
        linears=tuple(output.reports),
        bytes_before=sum(entry.num_bytes for entry in model.entries.values()),
        bytes_after=sum(e.num_bytes for e in CheckpointReader(staged).entries.values()),
        calibration=public_data(ours["calibration"]),
        seed=run.settings.seed,
        kv_cache=settings.kv_cache,
        adapter=adapter and {"name": public_name(adapter), "sha256": ours["adapter"]},
        kv_scales=output.kv_scales,
        quality=quality,
        seconds_by_stage=run.clock.seconds,
        warnings=(
            *plan.warnings,
            *plan.misfits,
            *([NOT_REGROUPED] if settings.act_order and not plan.act_order else []),
            *_warnings(run, model_tensors),
            *run.head_and_embedding.warnings(),
            *output.notes,
            *starved_warnings(output.reports),
        ),
        versions={"quantizer": settings.quantizer, **tool_versions()},
        seconds=run.clock.total,
        left_in_float=plan.reasons,
        loads_in={each.program: (each.answer, each.reason) for each in verdicts},
    )


def _config_changes(run: Run, model_tensors: LayerState) -> dict[str, Any]:
    is_untied = run.model.layer_map.head in model_tensors
    return {"tie_word_embeddings": False} if is_untied else {}


def _warnings(run: Run, model_tensors: LayerState) -> tuple[str, ...]:
    model = run.model
    warnings = list(run.data.warnings) if run.data else []
    if model.reader.unties_head:
        warnings.append(
            "config.json states a tied head, but lm_head differs from the embedding: "
            "lm_head is kept, and tie_word_embeddings is set to false"
        )
    if model.layer_map.head in model_tensors and model.layer_map.tied_head(model.config):
        warnings.append(
            "embedding and head were one matrix; the rotation makes them different: "
            "lm_head.weight is written, and tie_word_embeddings is set to false"
        )
    return tuple(warnings)
