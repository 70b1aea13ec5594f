"""From a float model folder to a quantized one, one decoder layer at a time.

Knows the order of the work; the maths is the recipe's, the bytes are formats'. At any time it holds
one layer, the calibration data's hidden states and the shard that is being filled, whatever the
model's size. A killed run goes on where it was.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from calibrate.adapter import check_counts, read_checked
from calibrate.clock import Clock
from calibrate.data import DEFAULT_LENGTH, DEFAULT_SAMPLES, CalibrationData, read_calibration
from calibrate.devices import Devices
from calibrate.digest import combined, tensor_digest
from calibrate.evaluate import make_windows, read_texts
from calibrate.float_model import FloatModel, check_finite
from calibrate.identity import identity
from calibrate.journal import Journal
from calibrate.kv_range import KvScales
from calibrate.layer import FinishedLayer, load_transforms, quantize_layer
from calibrate.model_card import CARD, RECIPE_FILE, model_card, recipe_text
from calibrate.recipe import (
    Recipe,
    check_makes,
    find_recipe,
    integer_activations,
    with_act_order,
)
from calibrate.report import REPORT, LinearReport, QuantizationReport, public_name, tool_versions
from calibrate.report_html import REPORT_HTML, to_html
from calibrate.solving import LayerContext, LayerState
from calibrate.verify import LinearDigest, kept_tensors, verify
from formats.checkpoint import (
    DEFAULT_MAX_SHARD_BYTES,
    CheckpointReader,
    CheckpointWriter,
    check_is_free,
)
from formats.errors import InputError
from formats.family import ATTENTION
from formats.inspect import inspect_checkpoint
from formats.layouts import Layout
from formats.padding import make_padding
from formats.plan import EXCEPTIONS_FORMAT, Plan, fits_any, make_plan
from formats.quant_config import BLOCK
from formats.scheme import Scheme
from formats.side_files import find_side_files

EVAL_WINDOWS, EVAL_LENGTH = 48, 1024
NOT_REGROUPED = "act-order: no linear's groups have other inputs for it; it is written without"
log = logging.getLogger(__name__)


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme,
    recipe: str | Recipe = "rtn",
    output_format: str | None = None,
    ignore: Sequence[str] = (),
    overrides: Iterable[tuple[str, Scheme]] = (),
    bits: float | None = None,
    pad: bool = False,
    input_scales: Mapping[str, torch.Tensor | float] | None = None,
    kv_cache: str | None = None,
    kv_per_head: bool = False,
    act_order: bool = False,
    adapter: str | Path | None = None,
    calibration: str | CalibrationData | None = None,
    samples: int = DEFAULT_SAMPLES,
    sequence_length: int = DEFAULT_LENGTH,
    seed: int = 0,
    eval_text: str | None = None,
    spill: str | Path | None = None,
    device: str | Sequence[str] = "cpu",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    progress: bool = True,
    quantizer: str = "qserve-kit",
    settings: Mapping[str, Any] | None = None,
) -> QuantizationReport:
    """Quantize every linear of every decoder layer of `source` and write `target`.

    What is not quantized is copied bit for bit, unless a transform of the recipe folds into it.
    `target` appears only when it is complete and has been read back.

    `recipe` is a row of RECIPES or one's own Recipe, whose unfinished run goes on only while the
    files of its functions are the same; "rtn" needs no data. `output_format` None: the
    scheme's default. `ignore`, `overrides` and `pad`: see formats/plan.py and formats/padding.py.
    `bits` on the mean: linears get 2 to 8 bits each, by what the data says that they need
    (calibrate/mixed_bits.py); `scheme` has the groups and the symmetry then.
    `kv_cache`, "int8" or "fp8", adds the scales of such a KV cache to every layer, or with
    `kv_per_head` to every KV head. `act_order`: groups have inputs of like
    size, by an index in the file that some readers take.
    `adapter`: a PEFT folder that stands beside the layers while data runs, and is not written.
    `input_scales` of static activations, by linear, replace those that the data gives.
    `calibration` is a file, a data set's name, or windows of token ids; None: the shipped texts,
    where data is needed. With `eval_text` both models' perplexity is measured. `spill` is a folder
    for the data's hidden states, to spare memory. Several of `device`, or "all" GPUs, share out the
    windows and a layer's linears (calibrate/devices.py); a solver of one's own must bear threads
    then. `quantizer` ("tool:version") and `settings` are
    recorded. Raises
    InputError on anything that the user can mend, before the first weight is read where possible;
    nothing is left behind then.
    """
    clock = Clock()
    check_is_free(target)
    model = FloatModel(source)
    find_side_files(model.folder)  # raises now, not after the work
    recipe = find_recipe(recipe)
    if act_order:
        recipe = with_act_order(recipe)
    if kv_per_head and kv_cache is None:
        raise InputError("--kv-per-head", "expected with --kv-cache-scheme", "give it, too")
    devices = Devices.parse(device)
    device = devices.first
    padding = make_padding(model.config, model.shapes, scheme) if pad else None
    planned = partial(
        make_plan,
        model.shapes,
        scheme,
        ignore=ignore,
        padding=padding,
        kv_cache=kv_cache,
        kv_per_head=kv_per_head,
        act_order=act_order,
        kept=dict.fromkeys(model.draft_linears, "is in a layer for drafts"),
        unasked=model.layer_map.kept_in_float(model.config),
    )
    if adapter is not None:
        family = model.layer_map.family
        model.adapter = read_checked(adapter, family, model.config, recipe, pads=pad)
    overrides = list(overrides)
    plan = planned(output_format=output_format, overrides=overrides)
    model.padding = plan.padding
    evaluation_WS = _read_evaluation(model, eval_text)
    if bits is not None:
        calibration = _read_data(model, calibration, samples, sequence_length, seed)
        with clock("choosing bits"):
            free = {n: s for n, s in plan.quantized.items() if not fits_any(overrides, n)}
            # transformers is loaded only where a model runs
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
    if calibration is not None or needs_data:
        data = _read_data(model, calibration, samples, sequence_length, seed)
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
    )
    context = LayerContext(
        layer_map=model.layer_map,
        config=model.config,
        spec=scheme.weight,
        activation_bits=integer_activations(scheme),
        activation=scheme.activation,
        seed=seed,
    )

    with (
        CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer,
        Journal(target, run_identity) as journal,
        tqdm(total=len(schemes), unit="linear", disable=not progress) as bar,
    ):
        model_tensors = _rewrite_model(model, recipe, context)
        stream = None
        if data is not None or evaluation_WS is not None:
            stream = _open_stream(
                model, recipe, context, model_tensors, data, evaluation_WS, plan, spill, devices
            )
        output = _Output(writer=writer, layout=layout, kept=kept_tensors(model, schemes))
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
                    show("running the data", advance=0)
                    statistics = stream.statistics(layer, state) if stream else {}
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
        output.add_rest(model_tensors, model)  # embeddings, last norm, head

        with clock("perplexity"):
            perplexity = _compare(model, model_tensors, stream, eval_text)
        config = {**model.config, **_config_changes(model, model_tensors)}
        if plan.act_order and not output.regrouped:
            plan = replace(plan, act_order=False)  # what more readers load, and faster
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
            calibration=_public(run_identity["calibration"]),
            kv_cache=kv_cache,
            adapter=adapter and {"name": public_name(adapter), "sha256": run_identity["adapter"]},
            kv_scales=output.kv_scales,
            perplexity=perplexity,
            seconds_by_stage=clock.seconds,
            warnings=(
                *plan.warnings,
                *([NOT_REGROUPED] if act_order and not plan.act_order else []),
                *_warnings(data, model, model_tensors),
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
        writer.write_text(REPORT_HTML, to_html(report))
        writer.publish()
        journal.remove()
    return report


@dataclass(slots=True, kw_only=True)
class _Output:
    """What goes into the target, and the proof of it that `verify` wants."""

    writer: CheckpointWriter
    layout: Layout
    kept: list[str]  # tensors besides the quantized weights that are not written yet
    digests: dict[str, LinearDigest] = field(default_factory=dict)
    rewritten: dict[str, str] = field(default_factory=dict)  # tensor -> its digest
    reports: list[LinearReport] = field(default_factory=list)
    kv_scales: dict[str, float] = field(default_factory=dict)  # by their tensors' names
    regrouped: bool = False  # does any linear have groups of inputs that stand apart?

    def add_layer(self, prefix: str, finished: FinishedLayer, model: FloatModel) -> None:
        """A layer's codes in the layout's tensors, then its other tensors."""
        reports = {report.name: report for report in finished.reports}
        for local, packed in finished.packed.items():
            name = f"{prefix}.{local}"
            self.regrouped |= packed.input_order is not None
            tensors = self.layout.encode(packed, name)
            for leaf, tensor in tensors.items():
                self.writer.add(f"{name}.{leaf}", tensor)
            self.digests[name] = LinearDigest.of(packed, tensors)
            num_bytes = sum(tensor.nbytes for tensor in tensors.values())
            self.reports.append(replace(reports[name], num_bytes=num_bytes))
        for name in [name for name in self.kept if name.startswith(prefix + ".")]:
            tensor = finished.changed.get(name.removeprefix(prefix + "."))
            if tensor is not None:
                tensor = tensor.to(model.entries[name].dtype)
                self.rewritten[name] = tensor_digest(tensor)
            self.writer.add(name, model.get(name) if tensor is None else tensor)
            self.kept.remove(name)

    def add_kv_scales(self, prefix: str, scales: KvScales) -> None:
        """A layer's two tensors of scales."""
        for kind in ("k_scale", "v_scale"):
            name, tensor = f"{prefix}.{ATTENTION}.{kind}", getattr(scales, kind)
            self.writer.add(name, tensor)
            self.rewritten[name] = tensor_digest(tensor)
            self.kv_scales[name] = float(tensor.max())

    def add_rest(self, rewritten: LayerState, model: FloatModel) -> None:
        """What stands outside of layers; `rewritten` replaces and adds tensors by full name."""
        for name in dict.fromkeys([*self.kept, *rewritten]):
            if name in rewritten:
                self.rewritten[name] = tensor_digest(rewritten[name])
            self.writer.add(name, rewritten[name] if name in rewritten else model.get(name))


def _show(bar: tqdm, layer: str, what: str, advance: int = 1) -> None:
    bar.set_description(f"{layer} {what}")
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


def _lacks_scales(
    schemes: Mapping[str, Scheme], input_scales: Mapping[str, torch.Tensor | float]
) -> bool:
    """Is a scale missing that only data can give?"""
    return any(
        scheme.activation is not None and not scheme.activation.dynamic and name not in input_scales
        for name, scheme in schemes.items()
    )


def _read_data(
    model: FloatModel,
    calibration: str | CalibrationData | None,
    samples: int,
    sequence_length: int,
    seed: int,
) -> CalibrationData:
    if isinstance(calibration, CalibrationData):
        return calibration
    data = read_calibration(
        calibration,
        model.tokenizer(),
        samples=samples,
        sequence_length=min(sequence_length, model.num_positions or DEFAULT_LENGTH),
        seed=seed,
    )
    for warning in data.warnings:
        log.warning("%s", warning)
    return data


def _read_evaluation(model: FloatModel, eval_text: str | None) -> torch.Tensor | None:
    if eval_text is None:
        return None
    tokenizer = model.tokenizer()
    return make_windows(
        read_texts(eval_text),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.bos_token_id,
        min(EVAL_LENGTH, model.num_positions or EVAL_LENGTH),
        EVAL_WINDOWS,
        source=eval_text,
        remedy="give a longer --eval-text; no flag sets its windows",
    )


def _rewrite_model(model: FloatModel, recipe: Recipe, context: LayerContext) -> LayerState:
    """Embeddings, last norm and head where a transform changes them; else empty."""
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


def _open_stream(
    model: FloatModel,
    recipe: Recipe,
    context: LayerContext,
    model_tensors: LayerState,
    data: CalibrationData | None,
    evaluation_WS: torch.Tensor | None,
    plan: Plan,
    spill: str | Path | None,
    devices: Devices,
) -> Any:
    # transformers is loaded only where a model runs
    from calibrate.capture import LayerRunner
    from calibrate.stream import Stream

    embedding = model.get(model.layer_map.embedding)
    return Stream(
        devices,
        [LayerRunner(model, model.layer_map, name) for name in devices.names],
        embedding,
        model_tensors.get(model.layer_map.embedding, embedding),
        calibration_WS=data.ids_WS if data else None,
        evaluation_WS=evaluation_WS,
        with_reference=recipe.corrects,
        kv_cache=plan.kv_cache,
        kv_per_head=plan.kv_per_head,
        spill=Path(spill) if spill else None,
    )


def _compare(
    model: FloatModel, model_tensors: LayerState, stream: Any, eval_text: str | None
) -> dict[str, Any] | None:
    if stream is None or eval_text is None:
        return None
    names = model.layer_map
    original = (model.get(names.last_norm), model.head())
    changed = original
    if model_tensors:
        changed = (model_tensors[names.last_norm], model_tensors[names.head])
    before, after = stream.perplexities(original, changed)
    return {
        "text": public_name(eval_text),
        "before": before.value,
        "after": after.value,
        "windows": before.windows,
        "sequence_length": stream.evaluation_WS.shape[1],
    }


def _config_changes(model: FloatModel, model_tensors: LayerState) -> dict[str, Any]:
    return {"tie_word_embeddings": False} if model.layer_map.head in model_tensors else {}


def _public(calibration: dict[str, Any] | None) -> dict[str, Any] | None:
    """The facts of the data, for readers of the report."""
    return calibration and {**calibration, "source": public_name(calibration["source"])}


def _warnings(
    data: CalibrationData | None, model: FloatModel, model_tensors: LayerState
) -> tuple[str, ...]:
    warnings = list(data.warnings) if data else []
    if model.layer_map.head in model_tensors and model.layer_map.tied_head(model.config):
        warnings.append(
            "embedding and head were one matrix; the rotation makes them two: lm_head.weight is"
            " written, tie_word_embeddings is false"
        )
    return tuple(warnings)
