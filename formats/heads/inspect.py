"""`qserve inspect` of a draft head's folder. Loads only its vocabulary tables."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from formats.errors import InputError
from formats.heads import tensors as names
from formats.heads.block_config import BlockConfig
from formats.heads.config import PEAGLE, EagleConfig, MedusaConfig
from formats.heads.folder import HeadFolder
from formats.inspection.findings import how_many
from formats.inspection.linear_summary import LinearSummary, float_linear
from formats.layouts import decode_linear, layout_of, tensor_names
from formats.table import size_text, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadInspection:
    """Report on a head: kind, sizes, linears and problems."""

    folder: str
    kind: str
    facts: tuple[str, ...]
    linears: tuple[LinearSummary, ...]
    total_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        linears = [{**asdict(linear), "traits": sorted(linear.traits)} for linear in self.linears]
        return {**asdict(self), "linears": linears, "ok": self.ok}

    def to_text(self) -> str:
        rows = [
            (n.name, str(n.out_features), str(n.in_features), n.scheme, size_text(n.num_bytes))
            for n in self.linears
        ]
        return "\n".join(
            [
                f"{self.folder}: a draft head, {self.kind}",
                *self.facts,
                "",
                text_table(("linear", "N", "K", "scheme", "bytes"), rows),
                "",
                f"total: {size_text(self.total_bytes)}",
                "loads in: this project (--speculative-config)"
                + ("; other servers read float heads alone" if _is_quantized(self.linears) else ""),
                "",
                *self.problems,
                how_many(self.problems),
            ]
        )


def inspect_head(folder: str | Path) -> HeadInspection:
    """Inspect a head's folder: decode every quantized linear and read every float tensor."""
    try:
        head = HeadFolder(folder)
    except InputError as error:
        return HeadInspection(
            folder=str(folder),
            kind="that cannot be read",
            facts=(),
            linears=(),
            total_bytes=0,
            problems=(f"error: {error}",),
        )
    linears, problems = [], []
    for name in names.linears(head.config):
        if not head.has_linear(name):
            continue
        try:
            linears.append(_linear(head, name))
        except InputError as error:
            problems.append(f"error: {error}")
    for name, entry in head.entries.items():
        is_float = entry.dtype.is_floating_point and entry.dtype.itemsize > 1
        if is_float and not torch.isfinite(head.get(name)).all():
            problems.append(f"error: {name}: contains NaN or infinity")
    return HeadInspection(
        folder=str(folder),
        kind=head.config.kind,
        facts=_facts(head),
        linears=tuple(linears),
        total_bytes=sum(entry.num_bytes for entry in head.entries.values()),
        problems=tuple(problems),
    )


def _is_quantized(linears: tuple[LinearSummary, ...]) -> bool:
    return any("float" not in linear.traits for linear in linears)


def _linear(head: HeadFolder, name: str) -> LinearSummary:
    module = head.stored(name)
    if head.has(f"{name}.weight") and not (head.quant and head.quant.scheme_for(module)):
        return float_linear(module, head.entries[head.stored(f"{name}.weight")])
    if head.quant is None:
        raise InputError(
            module,
            "has quantized tensors, but config.json has no block for them",
            "copy quantization_config from the published head",
        )
    found = tensor_names(module, layout_of(head.quant), head.entries)
    weight = decode_linear(module, {f: head.get(n) for f, n in found.items()}, head.quant)
    return LinearSummary(
        name=module,
        out_features=weight.out_features,
        in_features=weight.in_features,
        scheme=str(weight.scheme),
        num_bytes=sum(head.entries[n].num_bytes for n in found.values()),
    )


def _facts(head: HeadFolder) -> tuple[str, ...]:
    config = head.config
    if isinstance(config, MedusaConfig):
        return (f"{config.num_heads} heads of {config.num_layers} residual blocks",)
    lines = [
        f"{config.layout} layout, {config.num_layers} layers of {config.hidden_size}, draft"
        f" vocabulary {config.draft_vocab_size} of {config.vocab_size}"
    ]
    if config.explicit_aux_layers:
        lines.append(f"states that config.json names: {list(config.explicit_aux_layers)}")
    lines += _block_facts(config) if isinstance(config, BlockConfig) else _eagle_facts(config)
    for part, name in (("embedding", names.EMBEDDING), ("output matrix", names.HEAD)):
        if not head.has_linear(name.removesuffix(".weight")):
            lines.append(f"{part}: the model's")
    return tuple(lines)


def _eagle_facts(config: EagleConfig) -> list[str]:
    lines = []
    set_here = [
        name
        for name in ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")
        if getattr(config, name)
    ]
    if set_here:
        lines.append(f"set: {', '.join(set_here)}")
    if config.kind == PEAGLE:
        lines.append(f"drafts in one pass; mask token {config.mask_token_id}")
    if config.image_embeddings is not None or config.axis_pairs:
        seen = "their embeddings" if config.reads_images else "embeddings of the placeholder token"
        axes = f"; positions of three axes {list(config.axis_pairs)}" if config.axis_pairs else ""
        lines.append(f"images: {seen}{axes}")
    return lines


def _block_facts(config: BlockConfig) -> list[str]:
    lines = [
        f"drafts up to {config.max_drafts} tokens in one pass; mask token {config.mask_token_id}"
    ]
    windows = sorted({each.window for each in config.attentions if each.window is not None})
    if windows:
        lines.append(f"some layers see {', '.join(map(str, windows))} tokens")
    if config.markov_rank:
        lines.append(f"{config.markov_type} Markov head of rank {config.markov_rank}")
    return lines
