"""Quantize a float model folder into a quantized one, one decoder layer at a time.

At any time this holds one layer, the calibration data's hidden states and the shard being filled,
whatever the model's size. An interrupted run resumes.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.calibration.adapter import check_counts, read_checked
from calibrate.clock import Clock
from calibrate.devices import Devices
from calibrate.digest import combined
from calibrate.float_model import FloatModel, check_finite
from calibrate.layer import load_transforms, quantize_layer
from calibrate.outer import Outer
from calibrate.quality.card import quality_record
from calibrate.quality.evaluation import Evaluation, read_evaluation
from calibrate.recipe import (
    Recipe,
    check_keeps_embeddings,
    check_makes,
    find_recipe,
    integer_activations,
    with_act_order,
)
from calibrate.results.model_card import CARD, RECIPE_FILE, model_card, recipe_text
from calibrate.results.output import Output
from calibrate.results.report import (
    REPORT,
    LinearReport,
    QuantizationReport,
    public_data,
    public_name,
    starved_warnings,
    tool_versions,
)
from calibrate.results.report_html import REPORT_HTML, to_html
from calibrate.results.verify import kept_tensors, verify
from calibrate.resume.identity import identity
from calibrate.resume.journal import Journal
from calibrate.solvers.solving import LayerContext, LayerState
from calibrate.texts.data import (
    DEFAULT_LENGTH,
    DEFAULT_SAMPLES,
    CalibrationData,
    read_for_model,
)
from calibrate.texts.pictured import ChatReader
from formats.architecture.padding import make_padding
from formats.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    CheckpointReader,
    check_is_free,
)
from formats.errors import InputError
from formats.files.side_files import find_side_files
from formats.files.whole_writer import open_writer
from formats.hub.fetch import local_path
from formats.hub.selection import ADAPTER
from formats.inspection.inspect import inspect_checkpoint
from formats.names import FormatName, RecipeName
from formats.plan import EXCEPTIONS_FORMAT, fits_any, fitted_scheme, make_plan, usual_scheme
from formats.quality.checksums import checksums
from formats.quality.probe import NUM_TOKENS, Probe
from formats.quality.record import QUALITY
from formats.quant_config import BLOCK
from formats.scheme import Scheme, microscaled_inputs

NOT_REGROUPED = (
    "act-order: the groups of all linears have adjacent inputs anyway; written without act-order"
)
log = logging.getLogger(__name__)


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme,
    recipe: RecipeName | str | Recipe = "rtn",
    output_format: FormatName | str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
    bits: float | None = None,
    pad: bool = False,
    fit_groups: bool | None = False,
    input_scales: Mapping[str, torch.Tensor | float] | None = None,
    quantize_head: Scheme | None = None,
    quantize_embedding: Scheme | None = None,
    kv_cache: str | None = None,
    kv_per_head: bool = False,
    act_order: bool = False,
    moe_calibrate_all_experts: bool = False,
    adapter: str | Path | None = None,
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    bos: bool = True,
    eval_text: str | None = None,
    quality_windows: int = 0,
    spill: str | Path | None = None,
    device: str | Sequence[str] = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
    settings: Mapping[str, Any] | None = None,
    chats: ChatReader | None = None,
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    `source` and `adapter` are folders or hub names: ORG/NAME, ORG/NAME@REVISION.

    Tensors that are not quantized are copied bit for bit, unless a transform of the recipe is
    folded into them. `target` appears only when it is complete and has been read back.

    `recipe` is a name in RECIPES, or a Recipe of your own. An unfinished run with your own Recipe
    resumes only if it has the same `version`. "rtn" needs no data.

    `output_format` None: the scheme's default. `ignore`, `overrides` and `pad`: see formats/plan.py
    and formats/architecture/padding.py.

    `bits`: mean bits per weight. Each linear gets 2 to 8 bits according to its sensitivity
    (calibrate/mixed_bits.py); `scheme` then sets groups and symmetry. `fit_groups` replaces the
    scheme's groups by the largest of 128, 64 and 32 that fits every linear; None: only if
    they would leave over a tenth of the weights in float.

    `quantize_head` and `quantize_embedding`: schemes of these matrices, which else stay in float
    (calibrate/outer.py).

    `kv_cache`, "int8" or "fp8", adds the scales of such a KV cache to every layer, or with
    `kv_per_head` to every KV head. `act_order`: groups have inputs of similar magnitude, with an
    index in the file that only some programs read.

    `moe_calibrate_all_experts`: for statistics, every token passes through every expert of a
    mixture; the layer's output is still that of the experts that the router chose. `adapter`: a
    PEFT folder whose terms are added during calibration. `input_scales`, by linear, override the
    scales of static activations from the data.

    `calibration` is a file, a data set's name, or windows of token ids; None: the shipped texts, if
    data is needed. `chats` reads chats with images, as qserve/multimodal/calibration.py does; None:
    such data is refused. `bos`: windows begin as the tokenizer begins a text. `spill` is a folder
    for the data's hidden states, to save memory. Quality is measured on `eval_text`, or else on
    `quality_windows` windows of the package's held-out texts (quality/card.py).

    Several devices in `device`, or "all" GPUs, divide the windows and a layer's linears
    (calibrate/devices.py); a solver of your own must then be thread-safe. `quantizer`
    ("tool:version") and `settings` are recorded.

    Raises InputError for anything that the user can fix, if possible before the first weight is
    read; nothing is left behind then.
    """
    clock = Clock()
    check_is_free(target)
    source = local_path(source)
    adapter = adapter and local_path(adapter, ADAPTER)
    model = FloatModel(source)
    find_side_files(model.folder)  # raises now, not after the work
    recipe = find_recipe(recipe)
    if act_order:
        recipe = with_act_order(recipe)
    if model.reader.other_parts:
        check_keeps_embeddings(recipe)
    if kv_per_head and kv_cache is None:
        raise InputError("`kv_per_head`", "requires `kv_cache`", "add it")
    if kv_cache is not None:
        model.check_keys_are_kept()
    outer = Outer.of(model, quantize_head, quantize_embedding)
    overrides = [*outer.overrides, *overrides]
    if fit_groups is not False:
        choose = fitted_scheme if fit_groups else usual_scheme
        scheme = choose(scheme, model.shapes, ignore=ignore, overrides=overrides)
    devices = Devices.parse(device)
    device = devices.first
    padding = make_padding(model.config, model.shapes, scheme) if pad else None
    planned = partial(
        make_plan,
        model.shapes | outer.shapes,
        scheme,
        ignore=ignore,
        padding=padding,
        kv_cache=kv_cache,
        kv_per_head=kv_per_head,
        act_order=act_order,
        kept=dict.fromkeys(model.draft_linears, "belongs to a draft layer")
        | model.layer_map.routing_linears(model.config),
        unasked=model.layer_map.kept_in_float(model.config),
    )
    if adapter is not None:
        family = model.layer_map.family
        model.adapter = read_checked(adapter, family, model.config, recipe, pads=pad)
    if output_format is None and model.reader.other_parts:
        output_format = EXCEPTIONS_FORMAT  # servers find its list of modules in float
    if output_format is None and quantize_embedding is not None:
        output_format = EXCEPTIONS_FORMAT  # other formats have no embeddings in codes
    plan = planned(output_format=output_format, overrides=overrides)
    outer.check(plan)
    if plan.misfits:
        log.warning("%s", "\n".join(plan.misfits))
    model.padding = plan.padding
    evaluation = read_evaluation(model, eval_text, quality_windows, bos)
    if bits is not None:
        calibration = read_for_model(model, calibration, samples, sequence_length, seed, bos, chats)
        with clock("choosing bits"):
            free = {n: s for n, s in plan.quantized.items() if not fits_any(overrides, n)}
            # transformers is loaded only if a model runs.
            from calibrate.mixed_bits import mixed_overrides

            found = mixed_overrides(model, free, calibration, scheme, bits, device)
        plan = planned(
            output_format=output_format or EXCEPTIONS_FORMAT, overrides=[*overrides, *found]
        )
    schemes, layout = plan.quantized, plan.layout
    check_makes(recipe, schemes.values())
    input_scales = input_scales or {}
    data = None
    needs_data = recipe.needs_data or kv_cache is not None or _lacks_scales(schemes, input_scales)
    if adapter is not None:
        check_counts(recipe, needs_data)
    if moe_calibrate_all_experts:
        _check_all_experts(model, reads_data=calibration is not None or needs_data)
    if calibration is not None or needs_data:
        data = read_for_model(model, calibration, samples, sequence_length, seed, bos, chats)
    run_identity = identity(
        model.config,
        model.outer_digest(),
        schemes,
        recipe,
        data,
        seed,
        devices.kind,
        input_scales,
        f"{kv_cache} of heads" if kv_per_head else kv_cache,
        model.adapter,
        moe_calibrate_all_experts,
    )
    context = LayerContext(
        layer_map=model.layer_map,
        config=model.config,
        spec=scheme.weight.integer_form,
        activation_bits=integer_activations(scheme),
        activation=scheme.activation,
        seed=seed,
    )

    with (
        open_writer(target, model.reader, max_shard_bytes=max_shard_bytes) as writer,
        Journal(target, run_identity) as journal,
        tqdm(total=len(schemes), unit="linear", disable=not progress) as bar,
    ):
        model_tensors = _rewrite_model(model, recipe, context)
        outer.solve_embedding(model, model_tensors)
        stream = None
        if data is not None or evaluation is not None:
            # transformers is loaded only if a model runs.
            from calibrate.calibration.stream import open_stream

            stream = open_stream(
                model,
                recipe,
                model_tensors,
                data,
                evaluation and evaluation.ids_WS,
                plan,
                all_experts=moe_calibrate_all_experts,
                spill=spill,
                devices=devices,
                rows=outer.rows,
            )
        output = Output(writer=writer, layout=layout, kept=kept_tensors(model, schemes))
        for layer in range(model.num_layers):
            show = partial(_show, bar, f"layer {layer + 1}/{model.num_layers}")
            original = model.layer(layer, device)
            prefix = model.layer_map.prefix(layer)
            in_layer = replace(context, layer=layer, prefix=prefix, notes=[])
            state = load_transforms(original, recipe, in_layer)
            digest = model.layer_digests[layer]
            finished = journal.read(layer, device, digest)
            if finished is None:
                with clock("statistics"):
                    show("running the calibration data", advance=0)
                    statistics = {}
                    if stream is not None and _reads_data(recipe, prefix, schemes):
                        statistics = stream.statistics(layer, state)
                with clock("solving"):
                    finished = quantize_layer(
                        original,
                        state,
                        statistics,
                        schemes=schemes,
                        recipe=recipe,
                        context=in_layer,
                        input_scales=input_scales,
                        before_linear=show,
                        devices=devices,
                    )
                if stream is not None:
                    with clock("next inputs"):
                        stream.advance_reference(layer, state)
                if recipe.tuning is not None:
                    with clock("tuning"):
                        show("tuning", advance=0)
                        tuned = stream.tune(layer, state, finished, recipe.tuning, seed)
                        finished = tuned.measured_again(state, statistics)
                del statistics
                journal.write(layer, finished, digest)
            else:
                show("found finished", advance=len(finished.packed))
                if stream is not None:
                    stream.advance_reference(layer, state)
            kv_scales = None
            if stream is not None:
                with clock("next inputs"):
                    kv_scales = stream.advance(layer, original, finished)
            with clock("writing"):
                output.add_layer(in_layer.prefix, finished, model)
                if kv_scales is not None:
                    output.add_kv_scales(in_layer.prefix, kv_scales)
            _log_layer(in_layer.prefix, finished.reports)
        journal.all_solved = True
        with clock("solving"):
            outer.solve_head(model, model_tensors, stream, recipe, device)
        for name, (packed, linear) in outer.solved.items():
            _show(bar, "outside of layers", name)
            output.add_linear(name, packed, linear)
        output.add_rest(outer.without(model_tensors), model)  # last norm; embedding and head

        with clock("quality"):
            quality, probe = _compare(model, model_tensors, stream, evaluation, outer)
        if any(microscaled_inputs(each) is not None for each in schemes.values()):
            probe = None  # its logits are those of rounded inputs, which no engine here rounds
        config = {**model.config, **_config_changes(model, model_tensors), **outer.config_changes()}
        if plan.act_order and not output.regrouped:
            plan = replace(plan, act_order=False)  # more programs load this format, and faster
        block = plan.config(quantizer).to_dict()
        staged = writer.seal({**config, BLOCK: block}, side_files_from=model.folder)
        if layout.second_file is not None:
            writer.write_json(layout.second_file, block)
        with clock("reading back"):
            bar.set_description("reading back")
            verify(staged, output.digests, model, output.rewritten, config)
        verdicts = inspect_checkpoint(staged).loads_in
        report = QuantizationReport(
            source=public_name(source),
            source_sha256=combined(
                [run_identity["model"], *(model.layer_digests[i] for i in range(model.num_layers))]
            ),
            scheme=str(scheme) if bits is None else f"{scheme}, {bits} bits on the mean",
            recipe=recipe.name,
            format=layout.name,
            linears=tuple(output.reports),
            bytes_before=sum(entry.num_bytes for entry in model.entries.values()),
            bytes_after=sum(e.num_bytes for e in CheckpointReader(staged).entries.values()),
            calibration=public_data(run_identity["calibration"]),
            kv_cache=kv_cache,
            adapter=adapter and {"name": public_name(adapter), "sha256": run_identity["adapter"]},
            kv_scales=output.kv_scales,
            quality=quality,
            seconds_by_stage=clock.seconds,
            warnings=(
                *plan.warnings,
                *plan.misfits,
                *([NOT_REGROUPED] if act_order and not plan.act_order else []),
                *_warnings(data, model, model_tensors),
                *outer.warnings(),
                *starved_warnings(output.reports),
            ),
            versions={"quantizer": quantizer, **tool_versions()},
            seconds=clock.total,
            left_in_float=plan.reasons,
            loads_in={each.program: (each.answer, each.reason) for each in verdicts},
        )
        writer.write_text(CARD, model_card(report, verdicts, Path(target).name))
        if settings is not None:
            writer.write_text(RECIPE_FILE, recipe_text(settings))
        writer.write_json(REPORT, report.to_dict())
        sums = checksums(CheckpointReader(staged), schemes)
        writer.write_json(QUALITY, quality_record(report, probe, sums, settings, target))
        writer.write_text(REPORT_HTML, to_html(report))
        writer.publish()
        journal.remove()
    return report


def _reads_data(recipe: Recipe, prefix: str, schemes: Mapping[str, Scheme]) -> bool:
    """True if a layer's statistics are read: some linear is solved, or a transform changes all."""
    changes = any(transform.on_statistics is not None for transform in recipe.transforms)
    return changes or any(name.startswith(f"{prefix}.") for name in schemes)


def _show(bar: tqdm, where: str, what: str, advance: int = 1) -> None:
    bar.set_description(f"{where} {what}")
    bar.update(advance)


def _log_layer(prefix: str, reports: tuple[LinearReport, ...]) -> None:
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


def _check_all_experts(model: FloatModel, reads_data: bool) -> None:
    """Raise InputError if routing every token through every expert would change nothing."""
    flag, names = "--moe-calibrate-all-experts", model.layer_map
    layers = range(model.num_layers)
    if not any(names.has_own_linears(model.reader.config, layer) for layer in layers):
        raise InputError(
            flag,
            "has no effect: the model has no experts whose matrices are quantized",
            "remove it",
        )
    if not reads_data:
        raise InputError(
            flag,
            "has no effect: scheme and recipe need no data",
            "remove it, or choose a recipe such as gptq",
        )


def _lacks_scales(
    schemes: Mapping[str, Scheme], input_scales: Mapping[str, torch.Tensor | float]
) -> bool:
    """True if a scale is missing that only data can give."""
    return any(
        scheme.activation is not None and not scheme.activation.dynamic and name not in input_scales
        for name, scheme in schemes.items()
    )


def _rewrite_model(model: FloatModel, recipe: Recipe, context: LayerContext) -> LayerState:
    """Embeddings, last norm and head if a transform changes them; else empty."""
    transforms = [t.on_model for t in recipe.transforms if t.on_model is not None]
    if not transforms:
        return {}
    names = model.layer_map
    tensors = {
        names.embedding: model.get(names.embedding),
        names.last_norm: model.get(names.last_norm),
        names.head: model.head(),
    }
    check_finite(tensors, list(tensors), str(model.folder))
    for rewrite in transforms:
        tensors |= rewrite(tensors, context)
    return tensors


def _compare(
    model: FloatModel,
    model_tensors: LayerState,
    stream: Any,
    evaluation: Evaluation | None,
    outer: Outer,
) -> tuple[dict[str, Any] | None, Probe | None]:
    """Quality of the quantized model, and logits for a server to compare."""
    if stream is None or evaluation is None:
        return None, None
    names = model.layer_map
    original = (model.get(names.last_norm), model.head())
    changed = original
    if model_tensors:
        changed = (model_tensors[names.last_norm], model_tensors[names.head])
    changed = (changed[0], outer.head_of(changed[1], is_rewritten=bool(model_tensors)))
    found = stream.agreement(original, changed, evaluation.given)
    logits_SV = stream.first_logits(*changed, NUM_TOKENS)
    probe = Probe.of(evaluation.ids_WS[0], logits_SV, exact=logits_SV.dtype == torch.float32)
    return evaluation.record(found), probe


def _config_changes(model: FloatModel, model_tensors: LayerState) -> dict[str, Any]:
    return {"tie_word_embeddings": False} if model.layer_map.head in model_tensors else {}


def _warnings(
    data: CalibrationData | None, model: FloatModel, model_tensors: LayerState
) -> tuple[str, ...]:
    warnings = list(data.warnings) if data else []
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
