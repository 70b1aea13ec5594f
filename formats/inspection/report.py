"""Report on a model folder: what it holds, what is wrong with it, and which programs load it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from formats.architecture.next_token import DraftLayers
from formats.compatibility.loads_in import Verdict
from formats.inspection.findings import Problem, how_many
from formats.inspection.linear_summary import (
    LinearSummary,
    describe_experts,
)
from formats.quality.record import measured_text
from formats.table import count_text, size_text, text_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Report on a model folder."""

    folder: str
    architecture: str
    format: str  # "float", "gptq", or another tool's quant_method
    scheme: str  # from config.json; empty if it is missing or unreadable
    kv_cache: str | None  # "int8" or "fp8" if there are scales for such a cache
    linears: tuple[LinearSummary, ...]
    other_bytes: int  # embeddings, norms, biases, head
    total_bytes: int  # all tensors of the text model
    parallel: dict[int, str]  # number of GPUs -> why tensor parallelism fails; empty: it works
    loads_in: tuple[Verdict, ...]
    problems: tuple[Problem, ...]
    mxfp4_experts: tuple[int, int] = (0, 0)  # bytes and weights; not among the linears
    vision_bytes: int = 0  # tensors of the vision part, which stay in float
    draft_layers: DraftLayers | None = None  # MTP layers; None: config.json states none
    # Distance from the float model as `quantize` measured it; None: not measured
    quality: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """True if there are no errors; warnings are allowed."""
        return all(problem.severity != "error" for problem in self.problems)

    @property
    def bits_per_weight(self) -> float:
        """Return the bits on disk per weight of the linears; 0 without linears."""
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
        """Return the report: headline, table of linears, totals, problems, verdicts."""
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
            f"{count_text(len(rows), 'linear')}:"
            f" {size_text(sum(each.num_bytes for each in self.linears))},"
            f" {self.bits_per_weight:.2f} bits per weight;"
            f" other tensors: {size_text(self.other_bytes)}; total: {size_text(self.total_bytes)}",
            *([describe_experts(*self.mxfp4_experts)] if self.mxfp4_experts[0] else []),
            *([f"vision part: {size_text(self.vision_bytes)}, in float"] * bool(self.vision_bytes)),
            "",
            text_table(
                ("loads in", "", "why"), [(v.program, v.answer, v.reason) for v in self.loads_in]
            ),
            f"tensor parallel: {_parallel_text(self.parallel)}",
            *([] if self.draft_layers is None else [self.draft_layers.to_text()]),
            *([] if self.quality is None else [f"quality: {measured_text(self.quality)}"]),
            "",
            *(str(problem) for problem in self.problems),
            how_many(self.problems),
        ]
        return "\n".join(lines)


def _parallel_text(parallel: Mapping[int, str]) -> str:
    """Return the numbers of GPUs with the reasons why they fail; equal reasons once."""
    parts = []
    for why, sizes in groupby(parallel, key=lambda size: parallel[size]):
        parts.append(f"{', '.join(map(str, sizes))} {'no: ' + why if why else 'yes'}")
    return "; ".join(parts)
