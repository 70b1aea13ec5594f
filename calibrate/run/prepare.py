"""Prepare a run: check settings, plan schemes and read texts, before the first layer is read."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from calibrate.calibration.adapter import check_counts, read_checked
from calibrate.clock import Clock
from calibrate.devices import Devices
from calibrate.float_model import FloatModel, check_finite
from calibrate.head_and_embedding import HeadAndEmbedding
from calibrate.quality.evaluation import Evaluation, read_evaluation
from calibrate.recipe import (
    Recipe,
    check_keeps_embeddings,
    check_makes,
    find_recipe,
    integer_activations,
    with_act_order,
)
from calibrate.resume.identity import identity
from calibrate.run.settings import RunSettings
from calibrate.solvers.solving import LayerContext, LayerState
from calibrate.texts.data import CalibrationData
from formats.architecture.padding import make_padding
from formats.errors import InputError
from formats.files.side_files import find_side_files
from formats.files.target import check_is_free
from formats.hub.fetch import local_path
from formats.hub.selection import ADAPTER
from formats.plan import (
    EXCEPTIONS_FORMAT,
    Plan,
    default_group_scheme,
    fits_any,
    fitted_scheme,
    make_plan,
)
from formats.scheme import Scheme

if TYPE_CHECKING:  # it loads transformers
    from calibrate.calibration.stream import Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A checked run that is ready to start."""

    settings: RunSettings
    model: FloatModel
    recipe: Recipe
    scheme: Scheme  # scheme of linears without an override, after `fit_groups`
    plan: Plan
    head_and_embedding: HeadAndEmbedding
    devices: Devices
    data: CalibrationData | None
    evaluation: Evaluation | None
    context: LayerContext  # template; layers fill in number, prefix and notes
    identity: dict[str, Any]  # an unfinished run with the same identity resumes
    clock: Clock

    @property
    def schemes(self) -> Mapping[str, Scheme]:
        """Scheme of each linear that is quantized, by full name."""
        return self.plan.quantized

    def open_stream(self, model_tensors: LayerState) -> "Stream | None":
        """Return the stream of calibration and evaluation windows, or None if there are none."""
        if self.data is None and self.evaluation is None:
            return None
        # transformers is loaded only if a model runs.
        from calibrate.calibration.stream import open_stream

        return open_stream(
            self.model,
            self.recipe,
            model_tensors,
            self.data,
            self.evaluation and self.evaluation.ids_WS,
            self.plan,
            all_experts=self.settings.moe_calibrate_all_experts,
            spill=self.settings.spill,
            devices=self.devices,
            rows=self.head_and_embedding.rows,
        )


def prepare(settings: RunSettings, clock: Clock) -> Run:
    """Check the settings against the model and read the texts. Raises InputError."""
    check_is_free(settings.target)
    adapter = settings.adapter and local_path(settings.adapter, ADAPTER)
    settings = replace(
        settings,
        source=local_path(settings.source),
        adapter=adapter,
        overrides=list(settings.overrides),
    )
    model = FloatModel(settings.source)
    find_side_files(model.folder)  # raises now, not after the work
    recipe = _recipe(settings, model)
    if settings.kv_per_head and settings.kv_cache is None:
        raise InputError("`kv_per_head`", "requires `kv_cache`", "set it to int8 or fp8")
    if settings.kv_cache is not None:
        model.check_keys_are_kept()
    head_and_embedding = HeadAndEmbedding.of(
        model, settings.quantize_head, settings.quantize_embedding
    )
    settings = replace(settings, overrides=[*head_and_embedding.overrides, *settings.overrides])
    scheme = _scheme(settings, model)
    devices = Devices.parse(settings.device)
    if adapter is not None:
        family = model.layer_map.family
        model.adapter = read_checked(adapter, family, model.config, recipe, pads=settings.pad)
    planned = _planner(settings, model, scheme, head_and_embedding)
    output_format = settings.output_format
    if output_format is None and (model.reader.other_parts or settings.quantize_embedding):
        # Servers read this format's list of float modules; other formats cannot hold embeddings.
        output_format = EXCEPTIONS_FORMAT
    plan = planned(output_format=output_format, overrides=settings.overrides)
    head_and_embedding.check(plan)
    model.check_gains(plan.quantized.values())
    if plan.misfits:
        log.warning("%s", "\n".join(plan.misfits))
    model.padding = plan.padding
    evaluation = read_evaluation(model, settings.eval_text, settings.quality_windows, settings.bos)
    if settings.bits is not None:
        data = settings.read_calibration(model)
        settings = replace(settings, calibration=data)
        with clock("choosing bits"):
            chosen = _mixed_overrides(settings, model, plan, scheme, data, devices.first)
        plan = planned(
            output_format=output_format or EXCEPTIONS_FORMAT,
            overrides=[*settings.overrides, *chosen],
        )
    check_makes(recipe, plan.quantized.values())
    data = _data(settings, model, recipe, plan.quantized)
    kv_cache = settings.kv_cache
    return Run(
        settings=settings,
        model=model,
        recipe=recipe,
        scheme=scheme,
        plan=plan,
        head_and_embedding=head_and_embedding,
        devices=devices,
        data=data,
        evaluation=evaluation,
        context=LayerContext(
            layer_map=model.layer_map,
            config=model.config,
            spec=scheme.weight.integer_form,
            activation_bits=integer_activations(scheme),
            activation=scheme.activation,
            seed=settings.seed,
            quantized=frozenset(plan.quantized),
        ),
        identity=identity(
            model.config,
            model.outer_digest(),
            plan.quantized,
            recipe,
            data,
            settings.seed,
            devices.kind,
            settings.input_scales,
            f"{kv_cache} of heads" if settings.kv_per_head else kv_cache,
            model.adapter,
            settings.moe_calibrate_all_experts,
        ),
        clock=clock,
    )


def rewrite_model(model: FloatModel, recipe: Recipe, context: LayerContext) -> LayerState:
    """Return embedding, last norm and head if a transform of the recipe changes them, else {}."""
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


def _recipe(settings: RunSettings, model: FloatModel) -> Recipe:
    recipe = find_recipe(settings.recipe)
    if settings.act_order:
        recipe = with_act_order(recipe)
    if model.reader.other_parts:
        check_keeps_embeddings(recipe)
    return recipe


def _scheme(settings: RunSettings, model: FloatModel) -> Scheme:
    """Return the scheme with the group size that `fit_groups` requires."""
    if settings.fit_groups is False:
        return settings.scheme
    choose = fitted_scheme if settings.fit_groups else default_group_scheme
    return choose(
        settings.scheme, model.shapes, ignore=settings.ignore, overrides=settings.overrides
    )


def _planner(
    settings: RunSettings, model: FloatModel, scheme: Scheme, head_and_embedding: HeadAndEmbedding
) -> partial[Plan]:
    """Return a partial `make_plan` for this model; format and overrides are still to be given."""
    names = model.layer_map
    padding = make_padding(model.config, model.shapes, scheme) if settings.pad else None
    return partial(
        make_plan,
        model.shapes | head_and_embedding.shapes,
        scheme,
        ignore=settings.ignore,
        padding=padding,
        kv_cache=settings.kv_cache,
        kv_per_head=settings.kv_per_head,
        act_order=settings.act_order,
        kept=dict.fromkeys(model.draft_linears, "belongs to a draft layer")
        | names.routing_linears(model.config),
        unasked=names.kept_in_float(model.config),
    )


def _mixed_overrides(
    settings: RunSettings,
    model: FloatModel,
    plan: Plan,
    scheme: Scheme,
    data: CalibrationData,
    device: str,
) -> Sequence[tuple[str, Scheme]]:
    """Choose the bits of all linears without an override, for a mean of `bits`, as overrides."""
    # transformers is loaded only if a model runs.
    from calibrate.mixed_bits import mixed_overrides

    free = {n: s for n, s in plan.quantized.items() if not fits_any(settings.overrides, n)}
    return mixed_overrides(model, free, data, scheme, settings.bits, device)


def _data(
    settings: RunSettings, model: FloatModel, recipe: Recipe, schemes: Mapping[str, Scheme]
) -> CalibrationData | None:
    """Read the calibration data, or return None if neither settings nor recipe need any."""
    needs_data = (
        recipe.needs_data
        or settings.kv_cache is not None
        or _lacks_scales(schemes, settings.input_scales)
    )
    if settings.adapter is not None:
        check_counts(recipe, needs_data)
    reads_data = settings.calibration is not None or needs_data
    if settings.moe_calibrate_all_experts:
        _check_all_experts(model, reads_data)
    return settings.read_calibration(model) if reads_data else None


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
    """Return True if a static activation has no given scale, so that data must determine it."""
    return any(
        scheme.activation is not None and not scheme.activation.dynamic and name not in input_scales
        for name, scheme in schemes.items()
    )
