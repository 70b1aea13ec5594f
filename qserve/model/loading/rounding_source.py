"""RoundingSource: a float checkpoint whose linears are rounded to nearest as they are read.

A linear is rounded on the device, as a whole, before ranks take their shards. So its bits are those
that `qserve quantize --recipe rtn` writes with the same scheme.
"""

import torch

from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.in_memory.weights import Weight
from formats.layouts import quantized_modules
from formats.weight_digest import rounded
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.online_quantization import FLAG
from qserve.model.loading.weight_source import WeightSource
from qserve.model.model_config import ModelConfig


class RoundingSource(WeightSource):
    """Weights of a ModelConfig with a rounding plan."""

    def __init__(
        self, reader: CheckpointReader, config: ModelConfig, device: torch.device | None = None
    ) -> None:
        """Raises CheckpointError unless the file has every linear of the plan in float."""
        device = device or torch.device("cpu")
        super().__init__(reader, config, device)
        self._device = device
        self._schemes = config.rounding.schemes
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
                f"is missing from {reader.folder}, which {FLAG} needs",
                "the checkpoint is incomplete, or holds several matrices in one tensor",
            )

    def expect(self, prefix: str) -> None:
        """Begin to read ahead, into the host's memory; on a CPU that is the model's own."""
        if self._device.type != "cpu":
            super().expect(prefix)

    def is_quantized(self, module: str) -> bool:
        """True if a module is rounded."""
        return module in self._schemes

    def stays_in_float(self, module: str) -> bool:
        """True if a module is not rounded."""
        return module not in self._schemes

    def input_order(self, module: str, shape: tuple[int, int]) -> None:
        """None: natural order."""

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """A rounded linear's weight. Raises CheckpointError if it cannot be rounded."""
        weight_NK, digests = self._float(f"{module}.weight", shape)
        weight = rounded(weight_NK, self._schemes[module], module)
        if digests is not None:
            digests.weight(f"{module}.weight", weight)
        return weight

    def _float(
        self, name: str, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, DigestThreads | None]:
        """The float matrix, without a digest of its own, and where the weight's digest goes."""
        digests, self.digests = self.digests, None
        try:
            return self.tensor(name, shape), digests
        finally:
            self.digests = digests


def open_source(
    reader: CheckpointReader, config: ModelConfig, device: torch.device
) -> WeightSource:
    """Source of a model's weights: as stored, or rounded if the model has a rounding plan."""
    kind = WeightSource if config.rounding is None else RoundingSource
    return kind(reader, config, device)
