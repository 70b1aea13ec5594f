"""The tensors of a checkpoint, decoded, with a record of which were used. Ends with an audit."""

import logging

import torch

from formats import gptq
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.family import DERIVED
from formats.fp4 import Fp4Weight
from formats.kv_cache import check_kv_scale, find_kv_scales
from formats.layouts import decode_linear, is_quantized, layout_of, tensor_names
from formats.weights import Weight
from qserve.model.model_config import ModelConfig
from qserve.model.read_ahead import ReadAhead

logger = logging.getLogger(__name__)


class WeightSource:
    """Named tensors of a checkpoint, with a record of which were used."""

    def __init__(
        self, reader: CheckpointReader, config: ModelConfig, device: torch.device | None = None
    ) -> None:
        """Tensors come to `device`, the CPU unless given, and are decoded there."""
        self.reader = reader
        self._read = ReadAhead(reader, device or torch.device("cpu"))
        self.family, self.quant = config.family, config.quant
        self._tied_head = config.tied_head
        self._unread = self.family.unread(config.values)
        self._used: set[str] = set()
        self._kept: dict[str, Weight] = {}  # decoded before they were asked for
        self._mislabelled = 0  # linears whose zeros follow the other rule than the label says

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor. Raises CheckpointError where its shape is not `shape`."""
        if name not in self.reader:
            raise CheckpointError(name, f"is missing from {self.reader.folder}")
        found = self.reader.entries[name].shape
        if found != shape:
            raise CheckpointError(
                name, f"expected {list(shape)} from config.json, found {list(found)}"
            )
        self._used.add(name)
        return self._read.get(name)

    def expect(self, prefix: str) -> None:
        """Begin to read what is below a name: it will be asked for next."""
        self._read.expect(f"{prefix}.")

    def is_quantized(self, module: str) -> bool:
        return is_quantized(module, self.reader.entries)

    def stays_in_float(self, module: str) -> bool:
        """Does the configuration say that a module is not quantized?"""
        return self.quant is None or self.quant.scheme_for(module) is None

    def input_order(self, module: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """The order in which a quantized linear takes its inputs; None: their own.

        The weight is kept until it is asked for.
        """
        if module not in self._kept:
            self._kept[module] = self.weight(module, shape)
        return self._kept[module].input_order

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """A quantized linear's weight. Raises CheckpointError where its shape is not `shape`."""
        if module in self._kept:
            return self._kept.pop(module)
        if self.quant is None:
            raise CheckpointError(
                module, "has quantized tensors such as qweight, but no quantization_config"
            )
        names = tensor_names(module, layout_of(self.quant), self.reader.entries)
        tensors = {field: self._read.get(name) for field, name in names.items()}
        self._used.update(names.values())
        weight = decode_linear(module, tensors, self.quant)
        if (weight.out_features, weight.in_features) != shape:
            raise CheckpointError(
                module,
                f"expected {list(shape)} from config.json,"
                f" found {[weight.out_features, weight.in_features]}",
            )
        if isinstance(weight, Fp4Weight):  # no kernel has them; the codes are the same weights
            weight = weight.as_codes()
        if self.quant.layout == "gptq" and gptq.is_mislabelled(
            tensors, weight.spec, self.quant.zeros
        ):
            self._mislabelled += 1
        return weight

    def kv_scales(self, attention: str) -> dict[str, torch.Tensor]:
        """The k_scale and v_scale of a layer, as far as it has them. Raises CheckpointError."""
        scales = {}
        for kind, found in find_kv_scales(attention, self).items():
            self._used.update(found)
            if found:
                scale = self._read.get(found[0])
                check_kv_scale(found[0], scale, self.quant is not None and self.quant.kv_per_head)
                # of a layer a number, of its KV heads [J]
                scales[kind] = scale.float().reshape(-1).squeeze()
        return scales

    def __contains__(self, name: str) -> bool:
        return name in self.reader

    def audit(self, unread: tuple[str, ...] = ()) -> None:
        """Raise CheckpointError, with the names, where tensors were left over. Reads no more.

        `unread`: beginnings of names that others read.
        """
        self._read.close()
        if self.reader.num_other_parts:
            logger.info(
                "%s: the text model alone; %d tensors of other parts are not read",
                self.reader.folder,
                self.reader.num_other_parts,
            )
        if self._mislabelled:
            logger.warning(
                "%s: checkpoint_format says that zeros are %s, in %d linears the data says"
                " otherwise; loaded as the data says",
                self.reader.folder,
                self.quant.zeros,
                self._mislabelled,
            )
        left = {
            name
            for name in self.reader.entries.keys() - self._used
            if not name.endswith(DERIVED)
            and not name.startswith((*self._unread, *unread))
            and not self._is_zero_bias(name)
        }
        if self._tied_head:
            left.discard(self.family.head)  # stored twice by some writers
        if left:
            some = ", ".join(sorted(left)[:4])
            raise CheckpointError(
                str(self.reader.folder),
                f"{len(left)} tensors have no place in the model, among them {some}",
                "config.json and the weights do not belong together",
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Old GPTQ writers gave every linear a bias, of zero where the model has none."""
        return name.endswith(".bias") and not self.reader.get(name).any()
