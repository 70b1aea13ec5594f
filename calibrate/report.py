"""What a quantization run did, in numbers. Knows how to print itself, not how to quantize."""

import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from formats.scheme import Scheme
from formats.table import size_text, text_table
from formats.weights import Weight

REPORT = "quantization_report.json"
NUM_WORST = 5  # linears named in the summary


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearReport:
    """One linear: how far its dequantized weight is from the float one."""

    name: str
    shape: tuple[int, int]  # [N, K]
    scheme: str
    relative_error: float  # ||W - deq|| / ||W||, 0 for an all-zero weight
    largest_error: float  # max |W - deq|
    seconds: float  # in the solver
    num_bytes: int  # on disk, without the bias

    @classmethod
    def measure(
        cls,
        weight_NK: torch.Tensor,
        packed: Weight,
        scheme: Scheme,
        *,
        name: str,
        seconds: float,
        num_bytes: int,
    ) -> "LinearReport":
        """Compare a weight with its quantized form."""
        difference = packed.dequantize() - weight_NK.float()
        norm = float(weight_NK.double().norm())
        return cls(
            name=name,
            shape=(packed.out_features, packed.in_features),
            scheme=str(scheme),
            relative_error=float(difference.double().norm()) / norm if norm else 0.0,
            largest_error=float(difference.abs().max()),
            seconds=seconds,
            num_bytes=num_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationReport:
    """The whole run. Written beside the weights as quantization_report.json."""

    source: str
    scheme: str
    recipe: str
    format: str
    linears: tuple[LinearReport, ...]  # in the order they were written
    bytes_before: int  # of all tensors
    bytes_after: int
    versions: dict[str, str]
    seconds: float
    left_in_float: dict[str, str] = field(default_factory=dict)  # linear -> why

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
                f"{linear.largest_error:.2e}",
                f"{linear.seconds:.2f} s",
            )
            for linear in self.linears
        ]
        table = text_table(("linear", "N x K", "error", "largest", "time"), rows)
        worst = ", ".join(f"{w.name} {100 * w.relative_error:.2f} %" for w in self.worst)
        return (
            f"{table}\n\n"
            f"{len(self.linears)} linears to {self.scheme} by {self.recipe}, as {self.format},"
            f" in {self.seconds:.1f} s; error: ||W - Wq|| / ||W||\n"
            f"{size_text(self.bytes_before)} -> {size_text(self.bytes_after)},"
            f" {self.bits_per_weight:.2f} bits per quantized weight\n"
            f"worst: {worst}" + self._left_text()
        )

    def _left_text(self) -> str:
        """Which linears were left in float, by reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_in_float.items():
            by_reason.setdefault(reason, []).append(name)
        return "".join(
            f"\nleft in float: {', '.join(names)}: {reason}" for reason, names in by_reason.items()
        )


def tool_versions() -> dict[str, str]:
    """The versions that decide what the numbers are."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "safetensors": version("safetensors"),
    }
