"""`qserve inspect`: what a model folder holds, what is wrong with it, and which programs load it.

It reads headers, the small tensors of quantized linears (zeros, scales, group index) and all float
tensors, at the speed of the disk. It needs no model and no GPU. Damage becomes a Problem, so the
rest is still reported. Legend: N outputs, K inputs, G groups.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from formats.architecture.bare_model import bare_names, with_head
from formats.architecture.columns import LAST_LAYER
from formats.architecture.expert_names import canonical_names, renamed_experts
from formats.architecture.expert_stacks import coded_stacks
from formats.architecture.next_token import find_draft_layers
from formats.architecture.published_names.cosmos3 import reasoner_config
from formats.architecture.published_names.table import named_as_in_transformers
from formats.architecture.stored_form.config import canonical_config
from formats.architecture.stored_form.entries import canonical_entries
from formats.architecture.text_part import has_text_part, text_block, text_config
from formats.architecture.tied_head import HEAD, TIE, says_tied, settle_head
from formats.checkpoint import CONFIG, read_json
from formats.codecs import mxfp4
from formats.compatibility.loads_in import Facts, Verdict
from formats.compatibility.rules import loads_in
from formats.errors import COPY_BLOCK, CheckpointError, InputError
from formats.files.model_path import (
    check_is_no_adapter,
    gguf_name,
    is_mistral_folder,
    model_folder,
)
from formats.files.side_files import find_side_files
from formats.gguf.llama_cpp import verdict_of_folder
from formats.in_memory.fp8 import FP8_DTYPE
from formats.in_memory.k_weight import is_in_blocks
from formats.in_memory.packed import SCALE_DTYPES as FLOAT_DTYPES
from formats.inspection.awq import awq_linear, gemv_linear
from formats.inspection.compressed import compressed_linear
from formats.inspection.config import Choices, check_config
from formats.inspection.files import Shards, check_tokenizer, read_shards
from formats.inspection.findings import Findings
from formats.inspection.gptq import gptq_linear
from formats.inspection.kv import check_kv_scales
from formats.inspection.labels import check_fused, check_labels
from formats.inspection.linear_summary import (
    LinearSummary,
    decoded_linear,
    float_linear,
)
from formats.inspection.model import check_experts, check_model, check_places, check_shapes
from formats.inspection.parallel import parallel_sizes
from formats.inspection.report import Inspection
from formats.inspection.values import check_values
from formats.layouts import (
    READ_DECODED,
    decode_linear,
    has_input_factors,
    is_float_view,
    is_quantized,
    layout_of,
    quantized_modules,
    tensor_names,
    why_no_scheme,
)
from formats.mistral.verdicts import verdicts_of_format
from formats.other_tools.modelopt_config import METHODS as MODELOPT
from formats.other_tools.modelopt_config import algorithms
from formats.quality.record import Quality, read_quality
from formats.quant_config import BLOCK, QuantConfig, find_block, second_file
from formats.rules import LAYER_NUMBER, natural_key


def inspect_checkpoint(folder: str | Path) -> Inspection:
    """Inspect a model folder. Raises CheckpointError if it is not a readable folder."""
    named, folder = folder, model_folder(folder)
    if not folder.is_dir():
        raise CheckpointError(str(folder), "is not a folder", "give a local model folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(
            str(folder), "cannot be read: Permission denied", "allow reading: chmod u+rx"
        )
    check_is_no_adapter(folder)
    findings = Findings()
    config = _read_config(folder, findings)
    try:
        find_side_files(folder)
        check_tokenizer(folder, findings)
    except CheckpointError as error:
        findings.caught(error)
    whole = _architecture(config)
    shards = read_shards(folder, findings)
    config, stacks, renamed = _in_canonical_form(folder, config, shards, findings)
    block = _find_block(folder, config, findings)
    quant, config_error = _read_quantization(folder, block, config, shards, findings)
    linears = [*_quantized_linears(shards, block, quant, findings), *_float_linears(shards)]
    linears.sort(key=lambda linear: natural_key(linear.name))
    fused_mixed = ""
    if quant is None or layout_of(quant).fused_alike:
        fused_mixed = check_fused(linears, quant, findings)
    choices = check_config(config, findings) if config else Choices()
    unplaced = ""
    if not config_error:  # the tensors of an unsupported format are unknown
        check_labels(linears, quant, block, findings)
        check_model(config, shards, findings)
        check_experts(config, shards, findings)
        check_shapes(config, linears, shards, findings)
        unplaced = check_places(config, quant.layout if quant else None, shards, findings)
    check_kv_scales(config, quant, shards, findings)
    check_values(shards, findings)
    total_bytes = sum(entry.num_bytes for entry in shards.entries.values())
    method, experts = _format_name(block, shards), mxfp4.size_of_experts(shards.entries)
    block = block if isinstance(block, dict) else {}
    errors = [problem for problem in findings.problems if problem.severity == "error"]
    facts = Facts(
        architecture=_architecture(config),
        whole=whole,
        is_tied=says_tied(config),
        method=method,
        config=quant,
        config_error=config_error,
        linears=linears,
        choices=choices,
        first_error=next(
            (f"{e.subject}: {e.text}" for e in errors if not (e.read_here or e.unread)), ""
        ),
        fused_mixed=fused_mixed,
        unplaced=unplaced,
        desc_act=bool(block["desc_act"]) if "desc_act" in block else None,
        written_by_gptqmodel="gptqmodel" in str(block.get("meta", "")).lower(),
        second_file="" if config.get(BLOCK) is not None else second_file(folder),
        exceptions=bool(block.get("dynamic")),
        packing=str(block.get("packing_format", "")),
        algorithms=algorithms(block) if method in MODELOPT else (),
        stacked=next((name for name, dtype in stacks.items() if dtype != FP8_DTYPE), ""),
        renamed=None if stacks else renamed_experts(renamed),
    )
    quality = _read_quality(folder, findings)
    return Inspection(
        folder=str(named),
        architecture=next(iter(_architectures(config)), ""),
        format=method,
        scheme=_headline(linears) if quant else "",
        kv_cache=quant.kv_cache if quant else None,
        linears=tuple(linears),
        other_bytes=total_bytes - experts[0] - sum(linear.num_bytes for linear in linears),
        total_bytes=total_bytes,
        parallel=parallel_sizes(config, quant, linears),
        loads_in=_verdicts(folder, facts),
        problems=tuple(findings.problems),
        mxfp4_experts=experts,
        vision_bytes=shards.vision_bytes,
        draft_layers=find_draft_layers(config, shards.entries),
        quality=quality and quality.measured,
    )


def _verdicts(folder: Path, facts: Facts) -> tuple[Verdict, ...]:
    """Return the verdicts of all programs, on the format of the folder, too."""
    found = tuple(loads_in(facts))
    if is_mistral_folder(folder):
        return verdicts_of_format(found)
    return (*found, verdict_of_folder(folder)) if gguf_name(folder) else found


def _in_canonical_form(
    folder: Path, config: dict[str, Any], shards: Shards, findings: Findings
) -> tuple[dict[str, Any], dict[str, torch.dtype], dict[str, str]]:
    """Bring the entries of `shards` into the canonical form and names of the text model.

    Return the config in the canonical form, the dtypes of stored stacks of experts by name, and the
    canonical names by stored name ({}: they are the stored names).
    """
    shards.entries = named_as_in_transformers(config, shards.entries)
    config = reasoner_config(config)
    if has_text_part(config):
        shards.keep_text_part()
        config = text_config(config, shards.entries)
    config = canonical_config(config)
    stacks = coded_stacks(config, shards.entries)
    try:
        if not gguf_name(folder):  # tensors of a GGUF file are already in canonical form
            shards.entries = canonical_entries(config, shards.entries)
    except CheckpointError as error:
        findings.caught(error)
    bare = bare_names(shards.entries)
    shards.rename(bare)
    config = _settle_head(config, shards, findings)
    config = with_head(config, shards.entries, is_bare=bool(bare))
    renamed = canonical_names(config, shards.entries)
    shards.rename(renamed)
    return config, stacks, renamed


def _read_quality(folder: Path, findings: Findings) -> Quality | None:
    try:
        return read_quality(folder)
    except CheckpointError as error:
        findings.warning(error.subject, error.problem, error.remedy)
        return None


def _headline(linears: list[LinearSummary]) -> str:
    """Return the scheme of all linears, or the number of linears per scheme."""
    counts = Counter(
        "float" if "float" in linear.traits else linear.scheme for linear in linears
    ).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return "mixed: " + ", ".join(f"{number} {scheme}" for scheme, number in counts)


def _read_config(folder: Path, findings: Findings) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except CheckpointError as error:
        findings.caught(error)
        return {}


def _settle_head(config: dict[str, Any], shards: Shards, findings: Findings) -> dict[str, Any]:
    """Return config.json with its tie flag decided by the tensors.

    A flag that contradicts the tensors is reported, and so is a head that copies the embedding.
    """
    try:
        settled, shards.entries = settle_head(config, shards.entries)
    except CheckpointError as error:
        findings.caught(error)
        return config
    if settled is not config:
        findings.warning(
            f"{CONFIG} {TIE}",
            f"asks for a tied head, but {HEAD.removesuffix('.weight')} differs from the embedding:"
            " this project, transformers 5 and vLLM since August 2026 keep it, older readers and"
            " SGLang leave it out",
            "set it to false",
        )
    elif says_tied(config) and HEAD in shards:
        findings.warning(HEAD, "is a copy of the embedding it is tied to", "remove it")
    return settled


def _find_block(folder: Path, config: dict[str, Any], findings: Findings) -> Any:
    try:
        return find_block(folder, config)
    except CheckpointError as error:
        findings.caught(error)
        return None


def _read_quantization(
    folder: Path, block: Any, config: dict[str, Any], shards: Shards, findings: Findings
) -> tuple[QuantConfig | None, str]:
    """Return (the quantization config or None, why it cannot be read)."""
    has_codes = bool(quantized_modules(shards.entries))
    if block is None:
        if has_codes:
            findings.error(CONFIG, f"has no {BLOCK}, but there are quantized tensors")
        return None, ""
    try:
        quant = QuantConfig.from_dict(block)
    except InputError as error:
        findings.caught(error, unread=True)
        return None, f"{error.subject}: {error.problem}"
    if config and BLOCK not in config:  # an unreadable config.json is reported already
        findings.warning(
            second_file(folder),
            f"holds the {BLOCK}, config.json does not",
            "copy it into config.json",
        )
    if not has_codes and quant.scheme is not None and not shards.damaged:
        findings.error(CONFIG, f"has a {BLOCK}, but there are no quantized tensors")
    second = layout_of(quant).second_file
    if second is not None and (folder / second).exists() and BLOCK in config:
        try:
            if text_block(read_json(folder / second)) != block:
                findings.warning(second, f"differs from config.json's {BLOCK}", "copy the block")
        except CheckpointError as error:
            findings.caught(error)
    return quant, ""


def _quantized_linears(
    shards: Shards, block: Any, quant: QuantConfig | None, findings: Findings
) -> Iterable[LinearSummary]:
    """Check each quantized linear.

    Without a readable config, check GPTQ linears by their shapes.
    """
    stated = block.get("quant_method") if isinstance(block, dict) else "gptq"
    for name in quantized_modules(shards.entries):
        summary = None
        if quant is None:
            if stated == "gptq":
                summary = gptq_linear(name, shards, None, "v1", findings)
        else:
            summary = _quantized_linear(name, shards, quant, findings)
        if _is_there_twice(name, shards):
            findings.error(
                f"{name}.weight",
                "is stored together with codes of the same linear",
                "remove one of them",
            )
        if summary is not None:
            yield summary


def _is_there_twice(name: str, shards: Shards) -> bool:
    """Return True if a float weight is stored in addition to the codes of a linear."""
    weight = shards.entries.get(f"{name}.weight")
    if is_float_view(f"{name}.weight", shards.entries):
        return False
    packed = any(f"{name}.{field}" in shards for field in ("qweight", "weight_packed"))
    return weight is not None and (packed or weight.dtype in FLOAT_DTYPES)


def _quantized_linear(
    name: str, shards: Shards, quant: QuantConfig, findings: Findings
) -> LinearSummary | None:
    try:
        scheme = quant.scheme_for(name)
    except InputError as error:
        findings.caught(error)
        return None
    if scheme is None:
        findings.error(name, why_no_scheme(name, quant), COPY_BLOCK)
        return None
    if quant.layout == "gptq":
        return gptq_linear(name, shards, scheme, quant.zeros, findings)
    if quant.layout == "awq":
        return awq_linear(name, shards, scheme, findings)
    if quant.layout == "awq-gemv":
        return gemv_linear(name, shards, scheme, findings)
    if quant.layout in READ_DECODED or is_in_blocks(scheme.weight):
        return decoded_linear(
            name,
            tensor_names(name, layout_of(quant), shards.entries),
            lambda tensors: decode_linear(name, tensors, quant),
            shards,
            findings,
            scheme=scheme,
            traits=frozenset(
                ["unrounded inputs"] * bool(quant.unrounded_inputs)
                + ["input factors"] * has_input_factors(name, shards.entries)
            ),
        )
    return compressed_linear(name, shards, scheme, quant, findings)


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture of config.json, or "" if it states none or several."""
    names = _architectures(config)
    return names[0] if len(names) == 1 else ""


def _format_name(block: Any, shards: Shards) -> str:
    if isinstance(block, dict):
        return str(block.get("quant_method", "unknown"))
    return "gptq" if any(name.endswith(".qweight") for name in shards.entries) else "float"


def _float_linears(shards: Shards) -> Iterable[LinearSummary]:
    """Return the float matrices of decoder layers."""
    for name, entry in shards.entries.items():
        module = name.removesuffix(".weight")
        if (
            name.endswith(".weight")
            and len(entry.shape) == 2
            and LAYER_NUMBER.search(name)
            and not name.endswith(f".{LAST_LAYER.embedding}")
            and not is_quantized(module, shards.entries)
        ):
            yield float_linear(module, entry)
