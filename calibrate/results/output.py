"""Output: writes the tensors of a run and keeps the digests that verify them.

This module decides the order of tensors in a checkpoint.
"""

from dataclasses import dataclass, field, replace

from calibrate.calibration.kv_range import KvScales
from calibrate.digest import tensor_digest
from calibrate.float_model import FloatModel
from calibrate.layer import FinishedLayer
from calibrate.results.report import LinearReport
from calibrate.results.verify import LinearDigest
from calibrate.solvers.solving import LayerState
from formats.architecture.columns import ATTENTION
from formats.checkpoint import CheckpointWriter
from formats.files.channel_factors import ChannelFactors
from formats.in_memory.weights import Weight
from formats.layouts import Layout


@dataclass(slots=True, kw_only=True)
class Output:
    """Writer of the target folder, with the digests that `verify` compares."""

    writer: CheckpointWriter
    layout: Layout
    kept: list[str]  # tensors that stay in float and are not written yet
    digests: dict[str, LinearDigest] = field(default_factory=dict)
    rewritten: dict[str, str] = field(default_factory=dict)  # tensor -> its digest
    reports: list[LinearReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # transforms' notes on layers
    kv_scales: dict[str, float] = field(default_factory=dict)  # by tensor name
    factors: ChannelFactors = field(default_factory=ChannelFactors)  # by full name
    regrouped: bool = False  # some linear has groups of non-adjacent inputs (act-order)

    def add_layer(self, prefix: str, finished: FinishedLayer, model: FloatModel) -> None:
        """Write a layer's codes in the format's tensors, then its other tensors."""
        reports = {report.name: report for report in finished.reports}
        for local, packed in finished.packed.items():
            name = f"{prefix}.{local}"
            self.add_linear(name, packed, reports[name])
        self.notes += [f"{prefix}: {note}" for note in finished.notes]
        self.factors.multiply_(finished.factors, f"{prefix}.")
        for name in [name for name in self.kept if name.startswith(prefix + ".")]:
            tensor = finished.changed.get(name.removeprefix(prefix + "."))
            if tensor is not None:
                tensor = tensor.to(model.entries[name].dtype)
                self.rewritten[name] = tensor_digest(tensor)
            self.writer.add(name, model.get(name) if tensor is None else tensor)
            self.kept.remove(name)

    def add_linear(self, name: str, packed: Weight, report: LinearReport) -> None:
        """Write one linear's codes in the format's tensors."""
        self.regrouped |= packed.input_order is not None
        tensors = self.layout.encode(packed, name)
        for leaf, tensor in tensors.items():
            self.writer.add(f"{name}.{leaf}", tensor)
        self.digests[name] = LinearDigest.of(packed, tensors)
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.reports.append(replace(report, num_bytes=num_bytes))

    def add_kv_scales(self, prefix: str, scales: KvScales) -> None:
        """Write a layer's two tensors of KV scales."""
        for kind in ("k_scale", "v_scale"):
            name, tensor = f"{prefix}.{ATTENTION}.{kind}", getattr(scales, kind)
            self.writer.add(name, tensor)
            self.rewritten[name] = tensor_digest(tensor)
            self.kv_scales[name] = float(tensor.max())

    def add_rest(self, rewritten: LayerState, model: FloatModel) -> None:
        """Write the tensors outside of layers. `rewritten`: new or replaced ones, by full name."""
        for name in dict.fromkeys([*self.kept, *rewritten]):
            if name in rewritten:
                self.rewritten[name] = tensor_digest(rewritten[name])
            self.writer.add(name, rewritten[name] if name in rewritten else model.get(name))
