"""The checkpoint doctor: what a model folder holds, and what is wrong with it.

Reads headers, and of the tensors only the small ones of GPTQ linears (zeros, scales, group index).
Needs no model, GPU or memory. Damage becomes a Problem, so that the rest is still reported. Legend:
N outputs, K inputs, G groups.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import CONFIG, read_json
from formats.errors import CheckpointError, InputError
from formats.findings import Findings, Problem
from formats.inspect_files import Shards, read_shards
from formats.inspect_gptq import LinearSummary, gptq_linear, gptq_names
from formats.quant_config import BLOCK, QuantConfig
from formats.scheme import CHANNEL, Scheme
from formats.table import size_text, text_table

# Servers load the members of each row as one matrix, so all must have one scheme.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
# Families whose layers are all alike, with these tensors beside them.
UNIFORM_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
MODEL_TENSORS = ("model.embed_tokens.weight", "model.norm.weight")
HEAD = "lm_head.weight"
VLLM_GROUP_SIZES = (CHANNEL, 32, 64, 128)
LAYER_NUMBER = re.compile(r"\.layers\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What was found in a folder."""

    folder: str
    architecture: str
    format: str  # "float", "gptq", or another tool's quant_method
    scheme: str  # of config.json; empty where there is none, or none that can be read
    linears: tuple[LinearSummary, ...]
    other_bytes: int  # embeddings, norms, biases, head
    total_bytes: int  # of all tensors
    problems: tuple[Problem, ...]

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
        return {**asdict(self), "bits_per_weight": self.bits_per_weight, "ok": self.ok}

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
            + f" {self.scheme}" * bool(self.scheme),
            "",
            text_table(("linear", "N", "K", "scheme", "bytes"), rows),
            "",
            f"{len(rows)} linears: {size_text(self.total_bytes - self.other_bytes)},"
            f" {self.bits_per_weight:.2f} bits per weight;"
            f" other tensors: {size_text(self.other_bytes)}; total: {size_text(self.total_bytes)}",
            *(str(problem) for problem in self.problems),
            "no problems found" if not self.problems else f"{len(self.problems)} problems found",
        ]
        return "\n".join(lines)


def inspect_checkpoint(folder: str | Path) -> Inspection:
    """Look through a model folder. Raises CheckpointError only where it is no folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(str(folder), "is not a folder", "give a local model folder")
    findings = Findings()
    config = _read_config(folder, findings)
    shards = read_shards(folder, findings)
    block = config.get(BLOCK)
    scheme, layout = _read_quantization(folder, block, shards, findings)
    linears = [
        gptq_linear(name, shards, scheme, layout, findings) for name in gptq_names(shards, block)
    ]
    linears += _float_linears(shards)
    linears = sorted(filter(None, linears), key=lambda linear: _natural(linear.name))
    _check_fused(linears, findings)
    _check_model(config, shards, findings)
    total_bytes = sum(entry.num_bytes for entry in shards.entries.values())
    names = config.get("architectures")
    return Inspection(
        folder=str(folder),
        architecture=str(names[0]) if isinstance(names, list) and names else "",
        format=_format_name(block, shards),
        scheme=str(scheme) if scheme else "",
        linears=tuple(linears),
        other_bytes=total_bytes - sum(linear.num_bytes for linear in linears),
        total_bytes=total_bytes,
        problems=tuple(findings.problems),
    )


def _read_config(folder: Path, findings: Findings) -> dict[str, Any]:
    try:
        return read_json(folder / CONFIG)
    except CheckpointError as error:
        findings.caught(error)
        return {}


def _read_quantization(
    folder: Path, block: Any, shards: Shards, findings: Findings
) -> tuple[Scheme | None, str]:
    """(the scheme that config.json states, "gptq" or "gptq_v2": how zeros are stored)."""
    has_codes = any(name.endswith(".qweight") for name in shards.entries)
    if block is None:
        if has_codes:
            findings.error(CONFIG, f"has no {BLOCK}, but there are quantized tensors")
        return None, "gptq"
    scheme = None
    try:
        scheme = QuantConfig.from_dict(block).scheme
    except InputError as error:
        findings.caught(error)
    if not isinstance(block, dict) or block.get("quant_method") != "gptq":
        return None, "gptq"
    if not has_codes and not shards.damaged:
        findings.error(CONFIG, f"has a {BLOCK}, but there are no quantized tensors")
    if scheme is not None and not scheme.weight.symmetric:
        findings.warning(f"{BLOCK}.sym", "is false: vLLM loads only symmetric GPTQ")
    if scheme is not None and scheme.weight.group_size not in VLLM_GROUP_SIZES:
        findings.warning(
            f"{BLOCK}.group_size",
            f"is {scheme.weight.group_size}: vLLM's kernels take 32, 64, 128 or -1",
        )
    if block.get("desc_act"):
        findings.warning(f"{BLOCK}.desc_act", "is true: vLLM refuses it with groups", "requantize")
    copy = folder / "quantize_config.json"
    if copy.exists():
        try:
            if read_json(copy) != block:
                findings.warning(copy.name, f"differs from config.json's {BLOCK}", "copy the block")
        except CheckpointError as error:
            findings.caught(error)
    return scheme, str(block.get("checkpoint_format", block.get("format", "gptq")))


def _format_name(block: Any, shards: Shards) -> str:
    if isinstance(block, dict):
        return str(block.get("quant_method", "unknown"))
    return "gptq" if any(name.endswith(".qweight") for name in shards.entries) else "float"


def _float_linears(shards: Shards) -> Iterable[LinearSummary]:
    """The float matrices of decoder layers."""
    for name, entry in shards.entries.items():
        if name.endswith(".weight") and len(entry.shape) == 2 and LAYER_NUMBER.search(name):
            yield LinearSummary(
                name=name.removesuffix(".weight"),
                out_features=entry.shape[0],
                in_features=entry.shape[1],
                scheme=str(entry.dtype).removeprefix("torch."),
                num_bytes=entry.num_bytes,
            )


def _check_fused(linears: list[LinearSummary], findings: Findings) -> None:
    by_parent: dict[str, dict[str, str]] = defaultdict(dict)
    for linear in linears:
        parent, _, local = linear.name.rpartition(".")
        by_parent[parent][local] = linear.scheme
    for parent, schemes in by_parent.items():
        for members in FUSED:
            present = {local: schemes[local] for local in members if local in schemes}
            if len(set(present.values())) > 1:
                text = ", ".join(f"{local} {scheme}" for local, scheme in present.items())
                findings.error(
                    parent, f"{text}: servers load these as one matrix", "give them one scheme"
                )


def _check_model(config: dict[str, Any], shards: Shards, findings: Findings) -> None:
    """What the model as a whole must hold."""
    tied = bool(config.get("tie_word_embeddings", False))
    if tied and HEAD in shards:
        findings.warning(HEAD, "is stored, though it is tied to the embedding", "remove it")
    if config.get("model_type") not in UNIFORM_MODEL_TYPES or shards.damaged:
        return
    for name in MODEL_TENSORS if tied else (*MODEL_TENSORS, HEAD):
        if name not in shards and name not in shards.lost:
            findings.error(name, "is missing", "the checkpoint is incomplete")
    # A linear may lack g_idx, and may be float in one layer and quantized in another.
    seen = {
        re.sub(r"\.(qweight|qzeros|scales|g_idx)$", ".weight", name)
        for name in (*shards.entries, *shards.lost)
        if LAYER_NUMBER.search(name)
    }
    locals_seen = Counter(LAYER_NUMBER.sub(".layers.{i}.", name) for name in seen)
    layers = {int(LAYER_NUMBER.search(name)[1]) for name in seen}
    count = config.get("num_hidden_layers")
    if isinstance(count, int) and layers != set(range(count)):
        findings.error(
            CONFIG,
            f"states {count} layers, the tensors are of {len(layers)}"
            + f" (0 to {max(layers)})" * bool(layers),
            "the checkpoint is incomplete",
        )
    for local, number in sorted(locals_seen.items()):
        if number < len(layers):
            lacking = [i for i in sorted(layers) if local.replace("{i}", str(i)) not in seen]
            findings.error(
                local, f"is missing in layers {lacking[:8]}", "the checkpoint is incomplete"
            )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key: layers.2 before layers.10."""
    return [(len(part) if part.isdecimal() else 0, part) for part in name.split(".")]
