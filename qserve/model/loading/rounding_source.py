"""RoundingSource: a float checkpoint whose linears are rounded to nearest as they are read.

A linear is rounded on the device as a whole, before ranks take their shards. So the codes are those
that `qserve quantize --recipe rtn` writes with the same scheme. Several small experts are rounded
at a time, because a GPU runs the many kernels of a search faster than Python launches them.
"""

import re
from collections.abc import Collection, Mapping

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.in_memory.k_weight import is_k_quant
from formats.in_memory.slices import take_outputs
from formats.in_memory.weights import Weight
from formats.layouts import quantized_modules
from formats.numerics.affine import MIN_SCALE, MIN_STEPS, rows_at_once
from formats.scheme import Scheme
from formats.weight_digest import rounded
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.online_quantization import FLAG
from qserve.model.loading.read_ahead import Ranges
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig

EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
# A matrix whose largest weight is smaller than this may be refused. Rounding it together with other
# matrices would hide that.
SMALL = 2 * MIN_STEPS * MIN_SCALE


class RoundingSource(WeightSource):
    """Weight source for a ModelConfig with a rounding plan."""

    def __init__(
        self, reader: CheckpointReader, config: ModelConfig, device: torch.device | None = None
    ) -> None:
        """Raises CheckpointError unless the checkpoint has all linears of the plan in float."""
        device = device or torch.device("cpu")
        super().__init__(reader, config, device)
        self._device = device
        self._schemes, self._stored = config.rounding.schemes, reader.entries
        self._ready: dict[str, Weight] = {}  # weights that were rounded together with earlier ones
        self._elsewhere: set[str] = set()  # linears of experts on other ranks
        found = quantized_modules(reader.entries)
        if found:
            raise CheckpointError(
                f"{reader.folder}: {found[0]}",
                "has quantized tensors",
                f"remove {FLAG}, or start from the float model",
            )
        missing = [name for name in self._schemes if f"{name}.weight" not in reader]
        if missing:
            raise CheckpointError(
                f"{missing[0]}.weight",
                f"is missing from {reader.folder}",
                f"download the checkpoint again; if a tensor holds several matrices, remove {FLAG}",
            )

    def weight_rows(self, module: str, shape: tuple[int, int], ranges: Ranges) -> None:
        """Return None, because some schemes must round all outputs of a linear together."""

    def expect(self, prefix: str, without: Collection[str] = ()) -> None:
        """Start reading ahead into host memory. Does nothing on a CPU, to save memory."""
        self._elsewhere.update(without)
        if self._device.type != "cpu":
            super().expect(prefix, without)

    def is_quantized(self, module: str) -> bool:
        """Return True if a module is rounded."""
        return module in self._schemes

    def stays_in_float(self, module: str) -> bool:
        """Return True if a module is not rounded."""
        return module not in self._schemes

    def input_order(self, module: str, shape: tuple[int, int]) -> None:
        """Return None: inputs are in natural order."""

    def decode_together(self, modules: Mapping[str, tuple[int, int]]) -> None:
        """Do nothing: `weight` rounds the linears of several experts together."""

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """Return a linear's rounded weight. Raises CheckpointError if it cannot be rounded."""
        if module not in self._ready:
            self._round(self._together(module, shape), shape)
        return self._ready.pop(module)

    def _together(self, module: str, shape: tuple[int, int]) -> list[str]:
        """Return the linear, and the linears of later experts to round together with it."""
        scheme, (rows, inputs) = self._schemes[module], shape
        found = EXPERT.fullmatch(module)
        is_integer = scheme.weight.type == "int" and not is_k_quant(scheme.weight)
        count = rows_at_once(inputs, self._device) // max(1, rows)
        if found is None or not is_integer or count < 2:
            return [module]
        stem, number, linear = found.groups()
        names = [f"{stem}{int(number) + i}{linear}" for i in range(count)]
        return [
            name
            for name in names
            if self._schemes.get(name) == scheme
            and name not in self._elsewhere
            # ERNIE's later experts have another width
            and tuple(self._stored[f"{name}.weight"].shape) == shape
            and f"{name}.weight" not in self._used
        ]

    def _round(self, modules: list[str], shape: tuple[int, int]) -> None:
        """Round linears that have the same shape and scheme. Raises CheckpointError."""
        floats, digests = [], None
        for module in modules:
            weight_NK, digests = self._float(f"{module}.weight", shape)
            floats.append(weight_NK)
        scheme = self._schemes[modules[0]]
        weights = _rounded_together(floats, scheme) if len(modules) > 1 else None
        if weights is None:  # round one by one, also so that an error names the right linear
            weights = [rounded(each, scheme, m) for each, m in zip(floats, modules, strict=True)]
        self._ready |= dict(zip(modules, weights, strict=True))
        if digests is not None:
            for module in modules:
                digests.weight(f"{module}.weight", self._ready[module])

    def _float(
        self, name: str, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, DigestThreads | None]:
        """Read a float matrix without computing its digest. Returns it and `self.digests`."""
        digests, self.digests = self.digests, None
        try:
            return self.tensor(name, shape), digests
        finally:
            self.digests = digests


def _rounded_together(floats: list[torch.Tensor], scheme: Scheme) -> list[Weight] | None:
    """Round several matrices together. Returns None if one of them must be rounded separately."""
    if len({each.dtype for each in floats}) > 1:
        return None
    rows, whole = floats[0].shape[0], torch.cat(floats)
    largest = whole.view(len(floats), -1).abs().amax(1).tolist()
    if any(0 < each < SMALL for each in largest):
        return None
    try:
        weight = rounded(whole, scheme, "experts")
    except CheckpointError:
        return None
    starts = range(0, len(whole), rows)
    return [take_outputs(weight, ((start, start + rows),)) for start in starts]


def open_source(
    reader: CheckpointReader, config: ModelConfig, device: torch.device
) -> WeightSource:
    """Return the source of a model's weights, which rounds if the model has a rounding plan."""
    kind = WeightSource if config.rounding is None else RoundingSource
    return kind(reader, config, device)
