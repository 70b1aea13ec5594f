"""Quantize a float model into a GGUF file.

Solvers choose the codes on the grid of GGUF's blocks, so the file stores them without another
rounding.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from calibrate.float_model import FloatModel
from calibrate.pipeline import quantize_checkpoint
from calibrate.results.report import QuantizationReport
from formats.errors import InputError
from formats.files import staging
from formats.gguf import staged
from formats.gguf.architectures.architecture import Architecture
from formats.gguf.architectures.converted import ConvertedTensor, order_of
from formats.gguf.schemes import (
    BLOCK,
    OUTER_TYPES,
    base_scheme,
    fitting,
    name_of,
    outer_types,
    types_of_linears,
)
from formats.gguf.writing.container_writer import check_file_is_free
from formats.gguf.writing.export import check_exports, export_gguf, family_of
from formats.hub.fetch import local_path
from formats.inspection.inspect import inspect_checkpoint
from formats.numerics.torch_state import torch_defaults
from formats.plan import fits
from formats.rules import exact_patterns
from formats.scheme import K_BLOCK, Scheme

# Settings that do not apply to GGUF block types -> the reason
NOT_OF_BLOCKS = {
    "bits": "chooses integer codes",
    "pad": "is not needed: types fall back where inputs are no whole blocks",
    "act_order": "has no place in GGUF",
    "kv_cache": "has no place in GGUF",
    "fit_groups": "chooses groups, and blocks are fixed",
}
# Settings for model folders only: in a GGUF file both matrices always have a type
NOT_OF_FILES = ("quantize_head", "quantize_embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Types:
    """GGUF types of a model's tensors, as schemes where solvers choose the codes."""

    scheme: Scheme  # of most linears
    overrides: list[tuple[str, Scheme]]  # patterns and schemes of the other linears
    embedding: str
    head: str
    notes: tuple[str, ...]  # warnings about linears that got a fallback type


@torch_defaults()
def quantize_to_gguf(
    source: str | Path,
    target: str | Path,
    *,
    scheme: Scheme | str,
    overrides: Iterable[tuple[str, Scheme]] = (),
    **settings: Any,
) -> QuantizationReport:
    """Quantize `source` with the arguments of quantize_checkpoint and write one GGUF file.

    `scheme`: a scheme that GGUF has blocks for, or one of GGUF_TYPES, such as "q4_k_m". A hidden
    folder next to the file holds the quantized checkpoint until the file is complete; if the file
    cannot be written, the folder is kept as FILE-quantized. Minima of asymmetric blocks are rounded
    to float16.

    Raises InputError, before the model is read, for settings that GGUF cannot represent.
    """
    target = check_file_is_free(target)
    source, overrides = local_path(source), list(overrides)
    for name in NOT_OF_FILES:
        if settings.get(name):
            raise InputError(f"`{name}`", "does not apply to GGUF files", "remove it")
    if isinstance(scheme, str):
        for name, why in NOT_OF_BLOCKS.items():
            if settings.get(name):
                raise InputError(f"`{name}`", why, f"remove it, or write {scheme} without it")
        check_exports(source, base_scheme(scheme))
        types = _types(source, scheme, overrides)
        settings["output_format"] = staged.METHOD
    else:
        if settings.get("bits"):
            raise InputError("`bits`", "GGUF has no blocks of 2, 3 and 6 bits", "write q4_k_m")
        for each in (scheme, *(own for _, own in overrides)):
            check_exports(source, each)
        embedding, head = OUTER_TYPES
        types = _Types(scheme=scheme, overrides=overrides, embedding=embedding, head=head, notes=())
        settings["output_format"] = "compressed-tensors"
    folder = target.with_name(f".{target.name}.quantized")
    shutil.rmtree(folder, ignore_errors=True)  # left over from an interrupted run
    staging.register(folder)
    try:
        report = quantize_checkpoint(
            source, folder, scheme=types.scheme, overrides=types.overrides, **settings
        )
        try:
            written = export_gguf(
                folder, target, embedding_type=types.embedding, head_type=types.head, exact=False
            )
        except InputError as error:
            raise _with_kept(error, folder, target) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        staging.release(folder)
    inspection = inspect_checkpoint(target)
    sizes = {linear.name: linear.num_bytes for linear in inspection.linears}
    return replace(
        report,
        linears=tuple(replace(each, num_bytes=sizes[each.name]) for each in report.linears),
        format="gguf",
        scheme=scheme if isinstance(scheme, str) else report.scheme,
        bytes_after=written.num_bytes,
        loads_in={each.program: each[1:] for each in inspection.loads_in},
        warnings=(*report.warnings, *types.notes),
    )


def _with_kept(error: InputError, folder: Path, target: Path) -> InputError:
    """Keep the quantized folder, hours of work, under another name; name it in the error."""
    kept = target.with_name(f"{target.stem}-quantized")
    if kept.exists():
        return error
    folder.rename(kept)
    return InputError(
        error.subject,
        error.problem,
        f"{error.remedy or 'fix this'}; the quantized model is kept as the folder {kept}",
    )


def _types(source: Path, name: str, overrides: list[tuple[str, Scheme]]) -> _Types:
    """Choose the type of every linear: from the overrides, else from the mix `name`.

    A linear whose inputs do not fit the blocks of its type gets a fallback type. Raises SchemeError
    for an override that has no GGUF block type.
    """
    for _, own in overrides:
        name_of(own)  # raises
    model = FloatModel(source)
    family, row = family_of(model.config)
    wanted = types_of_linears(name, model.shapes, family, model.num_layers)
    for module in wanted:
        own = next((other for pattern, other in overrides if fits(pattern, module)), None)
        wanted[module] = own or wanted[module]
    runs = {
        module: _run_of_inputs(module, row, model.config, in_features)
        for module, (_, in_features) in model.shapes.items()
    }
    found = {module: fitting(scheme, runs[module]) for module, scheme in wanted.items()}
    base = base_scheme(name)
    others = {module: scheme for module, scheme in found.items() if scheme != base}
    patterns = [(f"re:{text}", scheme) for text, scheme in exact_patterns(found, others)]
    embedding, head = outer_types(name, family.is_tied(model.config))
    return _Types(
        scheme=base,
        overrides=[*patterns, *overrides],
        embedding=embedding,
        head=head,
        notes=_notes(wanted, found, model.shapes, runs),
    )


def _run_of_inputs(
    module: str, row: Architecture, config: Mapping[str, Any], in_features: int
) -> int:
    """Return the number of consecutive inputs of a linear that stay together in the file.

    It is all inputs, or those of one head if the export reorders heads. A block must lie within
    such a run, so that the export moves whole blocks.
    """
    for each in row.tensors.values():
        if not isinstance(each, ConvertedTensor):
            continue
        if module.endswith(f".{each.name.removesuffix('.weight')}"):
            order = order_of(each.columns, config)
            return in_features if order is None else order.numbers[-1]
    return in_features


def _notes(
    wanted: Mapping[str, Scheme],
    found: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
    runs: Mapping[str, int],
) -> tuple[str, ...]:
    """Return a note for each requested type, fallback type and number of inputs.

    Linears that fit no block type are reported by the plan.
    """
    counts = Counter(
        (
            name_of(wanted[module]),
            name_of(found[module]),
            "" if runs[module] == shapes[module][1] else "heads of ",
            runs[module],
        )
        for module in wanted
        if wanted[module] != found[module] and runs[module] % BLOCK == 0
    )
    return tuple(
        f"{count} linears of {kind}{in_features} inputs are {ours} instead of {theirs}, whose"
        f" blocks have {K_BLOCK} inputs"
        for (theirs, ours, kind, in_features), count in counts.items()
    )
