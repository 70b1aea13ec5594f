"""What a quantization run did, in numbers. Knows how to print itself, not how to quantize."""

import os
import platform
import re
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from calibrate.statistics import InputStatistics
from formats.scheme import Scheme
from formats.table import size_text, text_table
from formats.weights import Weight

REPORT = "quantization_report.json"
HUB_KINDS = ("models--", "datasets--")  # folders of the hub's cache: kind--owner--name
NUM_WORST = 5  # linears named in the summary
MAX_NAMES_SHOWN = 8  # of those left in float for one reason


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")  # (mixture, number)


def public_name(source: str | Path) -> str:
    """What a model or data set is called by others: its name on the hub, or its file's or folder's.

    Reports go out with a model; where it lay on somebody's machine does not.
    """
    if not Path(source).exists():
        return str(source)  # a name already
    path = Path(os.path.abspath(source))
    for index, part in enumerate(path.parts[:-2]):
        if part.startswith(HUB_KINDS) and path.parts[index + 1] == "snapshots":
            name = part.partition("--")[2].replace("--", "/")
            return "/".join([name, *path.parts[index + 3 :]])
    return path.name


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReport:
    """One linear: how far its dequantized weight, and what it computes, is from the float one."""

    name: str
    shape: tuple[int, int]  # [N, K]
    scheme: str
    relative_error: float  # ||W - deq|| / ||W||, 0 for an all-zero weight
    largest_error: float  # max |W - deq|
    output_error: float | None = None  # ||X (W - deq)^T|| / ||X W^T||; None without data
    weight_absmax: float = 0.0
    input_absmax: float | None = None  # of the calibration data
    tokens: int | None = None  # that reached it
    notes: tuple[str, ...] = ()  # fallbacks and other deviations from the recipe
    seconds: float  # in the solver
    num_bytes: int = 0  # on disk, without the bias; the pipeline fills it

    @classmethod
    def measure(
        cls,
        weight_NK: torch.Tensor,
        packed: Weight,
        scheme: Scheme,
        *,
        name: str,
        seconds: float,
        num_bytes: int = 0,
        stats: InputStatistics | None = None,
        notes: tuple[str, ...] = (),
    ) -> "LinearReport":
        """Compare a weight with its quantized form, and their outputs where there is data."""
        found_NK = packed.dequantize()
        difference = found_NK - weight_NK.float()
        norm = float(weight_NK.double().norm())
        return cls(
            name=name,
            shape=(packed.out_features, packed.in_features),
            scheme=str(scheme),
            relative_error=float(difference.double().norm()) / norm if norm else 0.0,
            largest_error=float(difference.abs().max()),
            output_error=stats and stats.relative_output_error(weight_NK, found_NK),
            weight_absmax=float(weight_NK.abs().max()),
            input_absmax=stats and float(stats.absmax_K.max()),
            tokens=stats and stats.num_tokens,
            notes=notes,
            seconds=seconds,
            num_bytes=num_bytes,
        )

    def measured_again(
        self, weight_NK: torch.Tensor, packed: Weight, stats: InputStatistics | None
    ) -> "LinearReport":
        """The same of other codes for the linear."""
        return LinearReport.measure(
            weight_NK,
            packed,
            packed.scheme,
            name=self.name,
            seconds=self.seconds,
            stats=stats,
            notes=self.notes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """The whole run. Written beside the weights as quantization_report.json."""

    source: str  # the model's name, as its readers know it
    source_sha256: str = ""  # of config.json and of every tensor
    scheme: str
    recipe: str
    format: str
    linears: tuple[LinearReport, ...]  # in the order they were written
    bytes_before: int  # of all tensors
    bytes_after: int
    calibration: dict[str, Any] | None = None  # source, seed, windows, hash of the token ids
    kv_cache: str | None = None  # "int8" or "fp8": the checkpoint has scales for such a KV cache
    kv_scales: dict[str, float] = field(default_factory=dict)  # the largest, by tensors' names
    adapter: dict[str, str] | None = None  # that stood beside the layers: name, hash
    perplexity: dict[str, Any] | None = None  # before and after, on which text
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    seconds: float
    left_in_float: dict[str, str] = field(default_factory=dict)  # linear -> why
    loads_in: dict[str, tuple[str, str]] = field(default_factory=dict)  # program -> answer, why

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per weight of the quantized linears: codes, scales, zeros, group index."""
        weights = sum(linear.shape[0] * linear.shape[1] for linear in self.linears)
        return 8 * sum(linear.num_bytes for linear in self.linears) / weights

    @property
    def worst(self) -> list[LinearReport]:
        """The linears with the largest relative error, the largest first."""
        return sorted(self.linears, key=lambda linear: -linear.relative_error)[:NUM_WORST]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}

    def to_text(self) -> str:
        """A table of all linears, and below it the summary."""
        rows = [
            (
                linear.name,
                f"{linear.shape[0]} x {linear.shape[1]}",
                f"{100 * linear.relative_error:.2f} %",
                "-" if linear.output_error is None else f"{100 * linear.output_error:.2f} %",
                f"{linear.largest_error:.2e}",
                f"{linear.seconds:.2f} s",
            )
            for linear in self.linears
        ]
        table = text_table(("linear", "N x K", "error", "output", "largest", "time"), rows)
        worst = ", ".join(f"{w.name} {100 * w.relative_error:.2f} %" for w in self.worst)
        lines = [f"warning: {warning}" for warning in self.warnings]
        lines += [f"{linear.name}: {note}" for linear in self.linears for note in linear.notes]
        lines += self._expert_lines()
        lines.append(
            f"{len(self.linears)} linears to {self.scheme} by {self.recipe}, as {self.format},"
            f" in {self.seconds:.1f} s; error: ||W - Wq|| / ||W||, output: the same of X W^T"
        )
        if self.kv_cache is not None:
            lines.append(f"{self.kv_cache} KV cache: {', '.join(self._kv_ranges())}")
        if self.adapter is not None:
            lines.append(f"data ran with the adapter {self.adapter['name']}, which is not in it")
        if self.perplexity:
            lines.append(
                f"perplexity {self.perplexity['before']:.4f} -> {self.perplexity['after']:.4f} on"
                f" {self.perplexity['windows']} windows of {self.perplexity['text']}"
            )
        lines.append(
            f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)},"
            f" {self.bits_per_weight:.2f} bits per quantized weight"
        )
        lines += [f"worst: {worst}", *self._left_lines(), *self._load_lines()]
        return "\n".join([table, "", *lines])

    def _load_lines(self) -> list[str]:
        """Who loads the checkpoint, and a line for each who does not."""
        able, lines = [], []
        for program, (answer, why) in self.loads_in.items():
            if answer == "yes":
                able.append(f"{program} ({why})" if why else program)
            else:
                lines.append(f"{program}: {answer}: {why}")
        return [f"loads in: {', '.join(able)}", *lines] if self.loads_in else []

    def _kv_ranges(self) -> list[str]:
        """Smallest and largest scale of all layers."""
        by_kind: dict[str, list[float]] = {}
        for name, scale in self.kv_scales.items():
            by_kind.setdefault(name.rpartition(".")[2], []).append(scale)
        return [f"{kind} {min(s):.3g} to {max(s):.3g}" for kind, s in by_kind.items()]

    def _expert_lines(self) -> list[str]:
        """Of each mixture of experts, how many tokens of the calibration data its experts saw."""
        by_mixture: dict[str, dict[int, int]] = {}
        for linear in self.linears:
            place = _EXPERT.match(linear.name)
            if place and linear.tokens is not None:
                by_mixture.setdefault(place[1], {}).setdefault(int(place[2]), linear.tokens)
        lines = []
        for name, tokens in by_mixture.items():
            least, most = min(tokens, key=tokens.get), max(tokens, key=tokens.get)
            lines.append(
                f"{name}: experts saw {tokens[least]} (expert {least}) to {tokens[most]} tokens"
                f" (expert {most}), half of them at most {median_low(tokens.values())}"
            )
        return lines

    def _left_lines(self) -> list[str]:
        """Which linears were left in float, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_in_float.items():
            by_reason.setdefault(reason, []).append(name)
        lines = []
        for reason, names in by_reason.items():
            more = len(names) - MAX_NAMES_SHOWN
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + f" and {more} more" * (more > 0)
            lines.append(f"left in float: {shown}: {reason}")
        return lines


def tool_versions() -> dict[str, str]:
    """The versions that decide what the numbers are."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "safetensors": version("safetensors"),
    }
