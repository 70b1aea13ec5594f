"""Report of a quantization run, as data and as text."""

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any

import torch

from calibrate.calibration.statistics import InputStatistics
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.numerics.multiples import find_multiples
from formats.quality.record import measured_text
from formats.scheme import Scheme
from formats.table import count_text, size_text, text_table

REPORT = "quantization_report.json"
HUB_KINDS = ("models--", "datasets--")  # folders in the hub's cache: kind--owner--name
NUM_WORST = 5  # linears named in the summary
MAX_NAMES_SHOWN = 8  # linears named per reason to stay in float


_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.")  # (mixture, number)


def public_name(source: str | Path) -> str:
    """Return the public name of a model or data set: its hub name, or its file or folder name.

    Reports are published with a model, so they must not contain local paths.
    """
    if not Path(source).exists():
        return str(source)  # already a public name
    path = Path(os.path.abspath(source))
    for index, part in enumerate(path.parts[:-2]):
        if part.startswith(HUB_KINDS) and path.parts[index + 1] == "snapshots":
            name = part.partition("--")[2].replace("--", "/")
            return "/".join([name, *path.parts[index + 3 :]])
    return path.name


def public_data(calibration: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the facts about calibration data with a public source name."""
    return calibration and {**calibration, "source": public_name(calibration["source"])}


def has_multiples(packed: Weight) -> bool:
    """Return True if rounding was asked for scales in multiples, and they are."""
    if not isinstance(packed, PackedWeight) or not packed.scheme.weight.in_multiples:
        return False
    return find_multiples(packed.scales_NG) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReport:
    """Errors of one linear's dequantized weight, and of its outputs, against the float linear."""

    name: str
    shape: tuple[int, int]  # [N, K]
    scheme: str
    relative_error: float  # ||W - deq|| / ||W||, 0 for an all-zero weight
    largest_error: float  # max |W - deq|
    output_error: float | None = None  # ||X (W - deq)^T|| / ||X W^T||; None without data
    held_out_error: float | None = None  # held-out windows: distance from the float model's output
    weight_absmax: float = 0.0
    input_absmax: float | None = None  # in the calibration data
    tokens: int | None = None  # calibration tokens that reached it
    notes: tuple[str, ...] = ()  # fallbacks and other deviations from the recipe
    seconds: float  # in the solver
    num_bytes: int = 0  # on disk, without the bias; set by the pipeline
    in_multiples: bool = False  # scales of a row are multiples of one number, as W4A8 wants them

    def cells(self) -> tuple[str, str, str, str]:
        """Return name, size and the two relative errors, formatted for tables."""
        return (
            self.name,
            f"{self.shape[0]} x {self.shape[1]}",
            f"{100 * self.relative_error:.2f} %",
            "-" if self.output_error is None else f"{100 * self.output_error:.2f} %",
        )

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
        """Compare a weight with its quantized form and, with data, the outputs of both."""
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
            held_out_error=stats and stats.held_out_error(weight_NK, found_NK),
            weight_absmax=float(weight_NK.abs().max()),
            input_absmax=stats and float(stats.absmax_K.max()),
            tokens=stats and stats.num_tokens,
            notes=notes,
            seconds=seconds,
            num_bytes=num_bytes,
            in_multiples=has_multiples(packed),
        )

    def measured_again(
        self, weight_NK: torch.Tensor, packed: Weight, stats: InputStatistics | None
    ) -> "LinearReport":
        """Return a copy with the errors of new codes for the same linear."""
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
    """Report of a whole run, written next to the weights as quantization_report.json."""

    source: str  # public name of the model
    source_sha256: str = ""  # of config.json and of every tensor
    scheme: str
    recipe: str
    format: str
    linears: tuple[LinearReport, ...]  # in the order they were written
    bytes_before: int  # of all tensors
    bytes_after: int
    calibration: dict[str, Any] | None = None  # source, seed, windows, hash of the token ids
    seed: int = 0  # of rotations, and of the order of tuning
    kv_cache: str | None = None  # "int8" or "fp8": the checkpoint has scales for such a KV cache
    kv_scales: dict[str, float] = field(default_factory=dict)  # by tensor name: its largest scale
    adapter: dict[str, str] | None = None  # name and hash of the adapter that was active
    # Perplexities, distance from the float model, and the text used (quality/evaluation.py)
    quality: dict[str, Any] | None = None
    seconds_by_stage: dict[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    versions: dict[str, str]
    seconds: float
    left_in_float: dict[str, str] = field(default_factory=dict)  # linear -> reason
    # program -> (answer, reason)
    loads_in: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def bits_per_weight(self) -> float:
        """Bits on disk per weight of the quantized linears: codes, scales, zeros, group index."""
        weights = sum(linear.shape[0] * linear.shape[1] for linear in self.linears)
        return 8 * sum(linear.num_bytes for linear in self.linears) / weights

    @property
    def worst(self) -> list[LinearReport]:
        """Linears with the largest relative error, the largest first."""
        return sorted(self.linears, key=lambda linear: -linear.relative_error)[:NUM_WORST]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bits_per_weight": self.bits_per_weight}

    def to_text(self) -> str:
        """Format a table of all linears, followed by a summary."""
        rows = [
            (
                *linear.cells(),
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
            f"{count_text(len(self.linears), 'linear')} to {self.scheme} by {self.recipe},"
            f" as {self.format}, in {self.seconds:.1f} s; error: ||W - Wq|| / ||W||, output: the"
            " same for X W^T"
        )
        in_multiples = sum(linear.in_multiples for linear in self.linears)
        if in_multiples:
            lines.append(
                f"{count_text(in_multiples, 'linear')} with scales that are whole multiples of one"
                " number in each row: products with int8 inputs are sums of integers"
            )
        if self.kv_cache is not None:
            lines.append(f"{self.kv_cache} KV cache: {', '.join(self._kv_ranges())}")
        if self.adapter is not None:
            lines.append(f"calibrated with the adapter {self.adapter['name']}, which is not merged")
        if self.quality:
            lines.append(measured_text(self.quality))
        lines.append(
            f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)},"
            f" {self.bits_per_weight:.2f} bits per quantized weight"
        )
        lines += [f"worst: {worst}", *self._left_lines(), *self._load_lines()]
        return "\n".join([table, "", *lines])

    def _load_lines(self) -> list[str]:
        """Return a line with all programs that load the checkpoint, and one per other program."""
        able, lines = [], []
        for program, (answer, why) in self.loads_in.items():
            if answer == "yes":
                able.append(f"{program} ({why})" if why else program)
            else:
                lines.append(f"{program}: {answer}: {why}")
        return [f"loads in: {', '.join(able)}", *lines] if self.loads_in else []

    def _kv_ranges(self) -> list[str]:
        """Return the range of scales over all layers, for keys and for values."""
        by_kind: dict[str, list[float]] = {}
        for name, scale in self.kv_scales.items():
            by_kind.setdefault(name.rpartition(".")[2], []).append(scale)
        return [f"{kind} {min(s):.3g} to {max(s):.3g}" for kind, s in by_kind.items()]

    def _expert_lines(self) -> list[str]:
        """Return a line about the calibration tokens per expert for each MoE layer."""
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
        """Return a line with the linears left in float for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_in_float.items():
            by_reason.setdefault(reason, []).append(name)
        lines = []
        for reason, names in by_reason.items():
            more = len(names) - MAX_NAMES_SHOWN
            shown = ", ".join(names[:MAX_NAMES_SHOWN]) + f" and {more} more" * (more > 0)
            lines.append(f"left in float: {shown}: {reason}")
        return lines


def starved_warnings(linears: Iterable[LinearReport]) -> tuple[str, ...]:
    """Return a warning for each MoE layer with experts that the calibration data did not reach."""
    found: dict[str, dict[int, bool]] = {}  # mixture -> expert -> did any token reach it
    for linear in linears:
        place = _EXPERT.match(linear.name)
        if place and linear.tokens is not None and not linear.input_absmax:
            experts = found.setdefault(place[1], {})
            number = int(place[2])
            experts[number] = experts.get(number, True) and linear.tokens > 0
    lines = []
    for name, experts in found.items():
        missed = [number for number, reached in sorted(experts.items()) if not reached]
        zeros = [number for number, reached in sorted(experts.items()) if reached]
        facts = [
            f"{text} {_numbered(numbers)}"
            for text, numbers in (
                ("no calibration token reached", missed),
                ("only zeros reached a linear of", zeros),
            )
            if numbers
        ]
        lines.append(
            f"{name}: {'; '.join(facts)}: their weights are rounded without data, and their static"
            " input scales are the largest of the layer's other experts"
            " (use --moe-calibrate-all-experts, or more --samples)"
        )
    return tuple(lines)


def _numbered(experts: list[int]) -> str:
    return f"expert{'s' * (len(experts) > 1)} {', '.join(map(str, experts))}"


def tool_versions() -> dict[str, str]:
    """Return the versions of Python and of packages that affect the results."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "safetensors": version("safetensors"),
    }
