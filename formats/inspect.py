"""The checkpoint doctor: what a model folder holds, what is wrong with it, and who loads it.

Reads headers, the small tensors of quantized linears (zeros, scales, group index), and every float
value, which takes as long as the disk does. Needs no model, GPU or memory. Damage becomes a
Problem, so that the rest is still reported.
Legend: N outputs, K inputs, G groups.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from formats.bare_model import bare_names, with_head
from formats.checkpoint import CONFIG, read_json
from formats.errors import CheckpointError, InputError
from formats.findings import Findings, Problem, how_many
from formats.inspect_awq import awq_linear, gemv_linear
from formats.inspect_compressed import compressed_linear
from formats.inspect_config import Choices, check_config
from formats.inspect_files import Shards, check_tokenizer, read_shards
from formats.inspect_gptq import gptq_linear
from formats.inspect_kv import check_kv_scales
from formats.inspect_model import check_model, check_places, check_shapes
from formats.inspect_values import check_values
from formats.layouts import is_quantized, layout_of
from formats.linear_summary import LinearSummary, float_linear
from formats.loads_in import Facts, Verdict
from formats.loads_in_rules import loads_in
from formats.next_token import EMBEDDING, DraftLayers, find_draft_layers
from formats.packed import SCALE_DTYPES as FLOAT_DTYPES
from formats.parallel import parallel_sizes
from formats.quant_config import BLOCK, QuantConfig, find_block, second_file
from formats.rules import FUSED, LAYER_NUMBER, natural_key
from formats.scheme import CHANNEL
from formats.side_files import find_side_files
from formats.table import size_text, text_table
from formats.text_part import has_text_part, text_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found in a folder."""

    folder: str
    architecture: str
    format: str  # "float", "gptq", or another tool's quant_method
    scheme: str  # of config.json; empty where there is none, or none that can be read
    kv_cache: str | None  # "int8" or "fp8", where there are scales for such a cache
    linears: tuple[LinearSummary, ...]
    other_bytes: int  # embeddings, norms, biases, head
    total_bytes: int  # of all tensors
    parallel: dict[int, str]  # number of GPUs -> why it cannot be; empty: it can
    loads_in: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    draft_layers: DraftLayers | None = None  # behind the model's own; None: config.json states none

    @property
    def ok(self) -> bool:
        """No errors; warnings may be there."""
        return all(problem.severity != "error" for problem in self.problems)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per weight of the linears; 0 without linears."""
        weights = sum(linear.out_features * linear.in_features for linear in self.linears)
        return 8 * sum(linear.num_bytes for linear in self.linears) / weights if weights else 0.0

    def to_dict(self) -> dict[str, Any]:
        linears = [{**asdict(linear), "traits": sorted(linear.traits)} for linear in self.linears]
        return {
            **asdict(self),
            "linears": linears,
            "loads_in": [verdict._asdict() for verdict in self.loads_in],
            "bits_per_weight": self.bits_per_weight,
            "ok": self.ok,
        }

    def to_text(self) -> str:
        """What it is, a table of the linears, the totals, the problems."""
        rows = [
            (
                linear.name,
                str(linear.out_features),
                str(linear.in_features),
                linear.scheme,
                size_text(linear.num_bytes),
            )
            for linear in self.linears
        ]
        lines = [
            f"{self.folder}: {self.architecture or 'no architecture'}, {self.format}"
            + f" {self.scheme}" * bool(self.scheme)
            + f", scales of an {self.kv_cache} KV cache" * bool(self.kv_cache),
            "",
            text_table(("linear", "N", "K", "scheme", "bytes"), rows),
            "",
            f"{len(rows)} linears: {size_text(self.total_bytes - self.other_bytes)},"
            f" {self.bits_per_weight:.2f} bits per weight;"
            f" other tensors: {size_text(self.other_bytes)}; total: {size_text(self.total_bytes)}",
            "",
            text_table(
                ("loads in", "", "why"), [(v.program, v.answer, v.reason) for v in self.loads_in]
            ),
            "tensor parallel: "
            + "; ".join(
                f"{size} {'no: ' + why if why else 'yes'}" for size, why in self.parallel.items()
            ),
            *([] if self.draft_layers is None else [self.draft_layers.to_text()]),
            "",
            *(str(problem) for problem in self.problems),
            how_many(self.problems),
        ]
        return "\n".join(lines)


def inspect_checkpoint(folder: str | Path) -> Inspection:
    """Look through a model folder. Raises CheckpointError where it is none, or closed to us."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(str(folder), "is not a folder", "give a local model folder")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise CheckpointError(str(folder), "cannot be read: Permission denied")
    findings = Findings()
    config = _read_config(folder, findings)
    try:
        find_side_files(folder)
        check_tokenizer(folder, findings)
    except CheckpointError as error:
        findings.caught(error)
    shards = read_shards(folder, findings)
    if has_text_part(config):
        shards.keep_text_part()
        config = text_config(config, shards.entries)
    renamed = bare_names(shards.entries)
    if renamed:
        shards.entries = {own: shards.entries[name] for name, own in renamed.items()}
    config = with_head(config, shards.entries, is_bare=bool(renamed))
    block = _find_block(folder, config, findings)
    quant, config_error = _read_quantization(folder, block, config, shards, findings)
    linears = [*_quantized_linears(shards, block, quant, findings), *_float_linears(shards)]
    linears.sort(key=lambda linear: natural_key(linear.name))
    fused_mixed = check_fused(linears, quant, findings)
    choices = check_config(config, findings) if config else Choices()
    unplaced = ""
    if not config_error:  # of a format that is not read, nobody knows what must be there
        _check_labels(linears, quant, block, findings)
        check_model(config, shards, findings)
        check_shapes(config, linears, shards, findings)
        unplaced = check_places(config, quant.layout if quant else None, shards, findings)
    check_kv_scales(quant, shards, findings)
    check_values(shards, findings)
    total_bytes = sum(entry.num_bytes for entry in shards.entries.values())
    names = config.get("architectures")
    names = [str(name) for name in names] if isinstance(names, list) else []
    method = _format_name(block, shards)
    block = block if isinstance(block, dict) else {}
    errors = [problem for problem in findings.problems if problem.severity == "error"]
    facts = Facts(
        architecture=names[0] if len(names) == 1 else "",
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
    )
    return Inspection(
        folder=str(folder),
        architecture=names[0] if names else "",
        format=method,
        scheme=_headline(linears) if quant else "",
        kv_cache=quant.kv_cache if quant else None,
        linears=tuple(linears),
        other_bytes=total_bytes - sum(linear.num_bytes for linear in linears),
        total_bytes=total_bytes,
        parallel=parallel_sizes(config, quant, linears),
        loads_in=tuple(loads_in(facts)),
        problems=tuple(findings.problems),
        draft_layers=find_draft_layers(config, shards.entries),
    )


def _headline(linears: list[LinearSummary]) -> str:
    """The scheme of all linears; of several, how many have which."""
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


def _find_block(folder: Path, config: dict[str, Any], findings: Findings) -> Any:
    try:
        return find_block(folder, config)
    except CheckpointError as error:
        findings.caught(error)
        return None


def _read_quantization(
    folder: Path, block: Any, config: dict[str, Any], shards: Shards, findings: Findings
) -> tuple[QuantConfig | None, str]:
    """(what config.json says of the linears, why it cannot be read)."""
    has_codes = any(is_quantized(module, shards.entries) for module in _modules(shards))
    if block is None:
        if has_codes:
            findings.error(CONFIG, f"has no {BLOCK}, but there are quantized tensors")
        return None, ""
    try:
        quant = QuantConfig.from_dict(block)
    except InputError as error:
        findings.caught(error, unread=True)
        return None, f"{error.subject}: {error.problem}"
    if config and BLOCK not in config:  # else it cannot be read, which is said already
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
            if read_json(folder / second) != block:
                findings.warning(second, f"differs from config.json's {BLOCK}", "copy the block")
        except CheckpointError as error:
            findings.caught(error)
    return quant, ""


def _modules(shards: Shards) -> Iterable[str]:
    return dict.fromkeys(name.rpartition(".")[0] for name in shards.entries)


def _quantized_linears(
    shards: Shards, block: Any, quant: QuantConfig | None, findings: Findings
) -> Iterable[LinearSummary]:
    """Check each quantized linear. Without a config that can be read, GPTQ ones by their shapes."""
    stated = block.get("quant_method") if isinstance(block, dict) else "gptq"
    for name in _modules(shards):
        if not is_quantized(name, shards.entries):
            continue
        summary = None
        if quant is None:
            if stated == "gptq":
                summary = gptq_linear(name, shards, None, "v1", findings)
        else:
            summary = _quantized_linear(name, shards, quant, findings)
        if _is_there_twice(name, shards):
            findings.error(
                f"{name}.weight", "stands beside the codes of the same linear", "remove one of them"
            )
        if summary is not None:
            yield summary


def _is_there_twice(name: str, shards: Shards) -> bool:
    """Is there a weight beside the codes of a linear?"""
    weight = shards.entries.get(f"{name}.weight")
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
        findings.error(
            name, "has quantized tensors, but the configuration leaves it in float", "mend it"
        )
        return None
    if quant.layout == "gptq":
        return gptq_linear(name, shards, scheme, quant.zeros, findings)
    if quant.layout == "awq":
        return awq_linear(name, shards, scheme, findings)
    if quant.layout == "awq-gemv":
        return gemv_linear(name, shards, scheme, findings)
    return compressed_linear(name, shards, scheme, quant, findings)


def _format_name(block: Any, shards: Shards) -> str:
    if isinstance(block, dict):
        return str(block.get("quant_method", "unknown"))
    return "gptq" if any(name.endswith(".qweight") for name in shards.entries) else "float"


def _float_linears(shards: Shards) -> Iterable[LinearSummary]:
    """The float matrices of decoder layers."""
    for name, entry in shards.entries.items():
        module = name.removesuffix(".weight")
        if (
            name.endswith(".weight")
            and len(entry.shape) == 2
            and LAYER_NUMBER.search(name)
            and not name.endswith(f".{EMBEDDING}")
            and not is_quantized(module, shards.entries)
        ):
            yield float_linear(module, entry)


def check_fused(linears: list[LinearSummary], quant: QuantConfig | None, findings: Findings) -> str:
    """Report members of a fused matrix that differ. Returns the first such matrix, or ""."""
    unstated = {linear.name for linear in linears if _is_float_unstated(linear, quant)}
    by_parent: dict[str, dict[str, str]] = defaultdict(dict)
    for linear in linears:
        parent, _, local = linear.name.rpartition(".")
        # floats of another dtype are cast into the matrix
        by_parent[parent][local] = "float" if "float" in linear.traits else linear.scheme
    first = ""
    for parent, schemes in by_parent.items():
        for members in FUSED:
            present = {local: schemes[local] for local in members if local in schemes}
            if len(set(present.values())) > 1:
                text = ", ".join(f"{local} {scheme}" for local, scheme in present.items())
                findings.error(
                    parent,
                    f"{text}: servers load these as one matrix",
                    "give them one scheme",
                    read_here=unstated.isdisjoint(f"{parent}.{local}" for local in present),
                )
                first = first or f"{', '.join(present)} of {parent}"
    return first


def _is_float_unstated(linear: LinearSummary, quant: QuantConfig | None) -> bool:
    """A float linear that no readable config leaves in float."""
    if "float" not in linear.traits:
        return False
    try:
        return quant is None or quant.scheme_for(linear.name) is not None
    except InputError:
        return True


def _check_act_order(
    linears: list[LinearSummary], quant: QuantConfig | None, block: Any, findings: Findings
) -> None:
    """A config that announces an index of groups, where groups can have one."""
    stated = isinstance(block, dict) and block.get("desc_act")
    if quant is None or not stated or all(s.weight.group_size == CHANNEL for s in quant.schemes):
        return
    text = "is true: vLLM refuses it with groups"
    if any("act-order" in linear.traits for linear in linears):
        findings.warning(f"{BLOCK}.desc_act", text, "requantize")
    elif any(linear.traits.isdisjoint({"float"}) for linear in linears):
        findings.warning(
            f"{BLOCK}.desc_act",
            f"{text}, and other readers take a slower path; every group index is in order",
            "set it to false: no weight changes",
        )


def _check_labels(
    linears: list[LinearSummary], quant: QuantConfig | None, block: Any, findings: Findings
) -> None:
    """What the linears say about labels of the config."""
    _check_act_order(linears, quant, block, findings)
    for linear in linears:
        if "act-order" in linear.traits and not (quant is not None and quant.act_order):
            leaf = "g_idx" if quant is None or quant.layout == "gptq" else "weight_g_idx"
            findings.error(
                f"{linear.name}.{leaf}",
                "inputs are not grouped in order, and the configuration does not say so: readers"
                " that believe it compute garbage",
                "state desc_act (actorder) if the index is meant, or remove it",
            )
    quantized = [linear for linear in linears if "float" not in linear.traits]
    if quant is None or quant.layout != "gptq" or quant.scheme.weight.symmetric or not quantized:
        return
    if all("symmetric data" in linear.traits for linear in quantized):
        findings.warning(
            f"{BLOCK}.sym",
            "is false, but all zero points are symmetric: vLLM would load it as symmetric",
            "set sym to true",
        )
    else:
        counts = Counter(linear.scheme for linear in quantized)
        findings.warning(
            f"{BLOCK}.sym",
            f"is false ({counts.most_common(1)[0][0]}): vLLM loads only symmetric GPTQ",
            "convert to awq or compressed-tensors",
        )
