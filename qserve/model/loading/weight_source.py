"""WeightSource: decoded tensors of a checkpoint, with an audit that all were used."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from formats.architecture.expert_names import describe_found
from formats.architecture.family import DERIVED
from formats.checkpoint import CheckpointReader
from formats.codecs import gptq
from formats.codecs.kv_cache import check_kv_scale, find_kv_scales
from formats.errors import COPY_BLOCK, DOWNLOAD_BOTH, CheckpointError
from formats.files.model_path import origin
from formats.files.tensor_entry import TensorEntry
from formats.in_memory.dense import is_dense
from formats.in_memory.weights import Weight
from formats.joint_decoding import STATED_SHAPE, decode_together
from formats.layouts import (
    decode_dense,
    decode_linear,
    has_input_factors,
    is_quantized,
    layout_of,
    tensor_names,
)
from formats.scheme import Scheme
from formats.table import count_text
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.finite_check import FiniteCheck
from qserve.model.loading.read_ahead import Ranges, ReadAhead
from qserve.model.model_config import ModelConfig

# Layout and fields of linears in whose tensors each row belongs to one output.
COMPRESSED = "compressed-tensors"
OTHER_CONFIG = "copy config.json from the checkpoint that has these weights"
BY_OUTPUT = {"weight_packed", "weight", "weight_scale"}
CODES_AT_ONCE = 1 << 26  # codes of the linears that are decoded together, up to 5 bytes each

logger = logging.getLogger(__name__)


class WeightSource:
    """Named tensors of a checkpoint. Records which tensors were used."""

    def __init__(
        self, reader: CheckpointReader, config: ModelConfig, device: torch.device | None = None
    ) -> None:
        """Tensors are moved to `device` (default: the CPU) and decoded there."""
        self.reader = reader
        self._read = ReadAhead(reader, device or torch.device("cpu"))
        self.family, self.quant = config.family, config.quant
        self._tied_head = config.tied_head
        self._unread = self.family.unread(config.values)
        self._used: set[str] = set()
        self._kept: dict[str, Weight] = {}  # weights that were decoded before they are requested
        # module -> tensors that were read and could not be decoded together with others
        self._read_before: dict[str, dict[str, torch.Tensor]] = {}
        self.digests: DigestThreads | None = None  # gets everything that is read
        self._finite = FiniteCheck()
        self._mislabelled = 0  # linears whose zero points contradict checkpoint_format

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Sequence[int] | None = None,
        *,
        integers: bool = False,
    ) -> torch.Tensor:
        """Return a float tensor. Some quantized linears are read as floats too (formats/in_memory).

        `rows`: row numbers in ascending order; None: all. `integers`: the tensor may hold integers.
        Raises CheckpointError if the tensor is missing or has another shape than `shape`.
        """
        module = name.removesuffix(".weight")
        if module != name and self._is_dense(module):
            dense = self._dense(module, shape)
            return dense if rows is None else dense[list(rows)]
        if name not in self.reader:
            raise CheckpointError(
                name,
                f"is missing from {origin(self.reader.folder)}",
                DOWNLOAD_BOTH,
            )
        found = self.reader.entries[name].shape
        if found != shape:
            raise CheckpointError(
                name,
                f"expected {list(shape)} from config.json, found {list(found)}",
                OTHER_CONFIG,
            )
        self._used.add(name)
        if rows is not None and self.digests is None:
            found = self._read.rows(name, rows)
            self._check_numbers(name, found, integers)
            return found
        found = self._read.get(name)
        self._check_numbers(name, found, integers)
        if self.digests is not None:
            self.digests.tensor(name, found)
        return found if rows is None else found[list(rows)]

    def _check_numbers(self, name: str, found: torch.Tensor, integers: bool = False) -> None:
        """Raise CheckpointError for integers; `audit` will raise it for NaN and infinity."""
        if not (integers or found.is_floating_point()):
            raise CheckpointError(
                name,
                f"expected floating point numbers, found {found.dtype}",
                "copy config.json with its quantization_config from the original checkpoint",
            )
        self._finite.add(name, found)

    def expect(self, prefix: str, without: Collection[str] = ()) -> None:
        """Start reading the tensors below a prefix, which will be needed next.

        `without`: names of tensors and modules to leave out.
        """
        self._read.expect(f"{prefix}.", without)

    def is_quantized(self, module: str) -> bool:
        """Return True if a module runs with quantized weights."""
        return is_quantized(module, self.reader.entries) and not self._is_dense(module)

    def has_linear(self, module: str) -> bool:
        """Return True if the checkpoint has a module's weight, float or quantized."""
        return f"{module}.weight" in self.reader or is_quantized(module, self.reader.entries)

    def _is_dense(self, module: str) -> bool:
        """Return True if a module is quantized but read as floats, since no kernel supports it."""
        if self.quant is None or not is_quantized(module, self.reader.entries):
            return False
        if has_input_factors(module, self.reader.entries):
            return True
        scheme = self.quant.scheme_for(module)
        return scheme is not None and is_dense(scheme.weight)

    def stays_in_float(self, module: str) -> bool:
        """Return True if, by the configuration, a module runs with float weights."""
        if self.quant is None or self._is_dense(module):
            return True
        return self.quant.scheme_for(module) is None

    def check_has_experts(self, prefix: str, modules: Iterable[str]) -> None:
        """Raise CheckpointError if a linear of an expert is missing; it lists what was found."""
        for module in modules:
            if not self.has_linear(module):
                raise CheckpointError(
                    f"{module}.weight",
                    f"is missing; the file has {describe_found(prefix, self.reader.entries)}",
                    "download the checkpoint again, or rename its experts as in transformers",
                )

    def input_order(self, module: str, shape: tuple[int, int]) -> torch.Tensor | None:
        """Return the order of a quantized linear's inputs; None: natural order.

        The decoded weight is kept until `weight` requests it.
        """
        if module not in self._kept:
            self._kept[module] = self.weight(module, shape)
        return self._kept[module].input_order

    def decode_together(self, modules: Mapping[str, tuple[int, int]]) -> None:
        """Decode linears in few calls and keep them until `weight` requests them.

        modules: module name -> shape [N, K]. Linears that cannot be decoded together are left to
        `weight`, which raises the error if one is wrong.
        """
        if self.quant is None or not layout_of(self.quant).output_axes:
            return
        alike: dict[tuple[tuple[int, int], Scheme | None], list[str]] = {}
        for module, shape in modules.items():
            if self.is_quantized(module):
                alike.setdefault((shape, self.quant.scheme_for(module)), []).append(module)
        for (shape, _), names in alike.items():
            at_once = max(1, CODES_AT_ONCE // (shape[0] * shape[1]))
            for first in range(0, len(names), at_once):
                if not self._decode_and_keep(names[first : first + at_once], shape):
                    break  # the others would be read before they are needed, and not decoded

    def _decode_and_keep(self, modules: list[str], shape: tuple[int, int]) -> bool:
        """Decode linears together and keep them. Returns False if that is not possible."""
        if len(modules) < 2:
            return False
        tensors = {module: self._tensors(module, shared=True) for module in modules}
        weights = decode_together(tensors, self.quant)
        if weights is None or (weights[0].out_features, weights[0].in_features) != shape:
            for module, own in tensors.items():
                self._read_before[module] = {field: each.clone() for field, each in own.items()}
            return False
        self._kept |= zip(modules, weights, strict=True)
        self._record(tensors, weights)
        return True

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """Return a quantized linear's weight. Raises CheckpointError if its shape is wrong."""
        if module in self._kept:
            return self._kept.pop(module)
        tensors = self._read_before.pop(module, None) or self._tensors(module)
        weight = decode_linear(module, tensors, self.quant)
        _check_shape(module, shape, (weight.out_features, weight.in_features))
        self._record({module: tensors}, [weight])
        return weight

    def _record(
        self, tensors: Mapping[str, Mapping[str, torch.Tensor]], weights: Sequence[Weight]
    ) -> None:
        """Compute digests of decoded weights, if requested, and count contradicted labels.

        The labels of weights that were decoded together are all right or all wrong.
        """
        modules = list(tensors)
        if self.digests is not None:
            for module, weight in zip(modules, weights, strict=True):
                self.digests.weight(f"{module}.weight", weight)
        if self.quant.layout == "gptq" and gptq.is_mislabelled(
            tensors[modules[0]], weights[0].spec, self.quant.zeros
        ):
            self._mislabelled += len(modules)

    def float_rows(
        self, module: str, shape: tuple[int, int], ranges: Ranges
    ) -> torch.Tensor | None:
        """Return some outputs of a float linear; None if they cannot be read separately."""
        name = f"{module}.weight"
        entry = self.reader.entries.get(name)
        if self.digests is not None or self._is_dense(module):
            return None
        if not isinstance(entry, TensorEntry) or entry.shape != shape:
            return None  # already in memory, or invalid: then `tensor` raises the error
        self._used.add(name)
        found = self._read.get_rows(name, ranges)
        self._check_numbers(name, found)
        return found

    def weight_rows(self, module: str, shape: tuple[int, int], ranges: Ranges) -> Weight | None:
        """Return some outputs of a quantized linear; None if they cannot be read separately.

        Raises CheckpointError.
        """
        if self.digests is not None or module in self._kept or self.quant is None:
            return None
        names = tensor_names(module, layout_of(self.quant), self.reader.entries)
        entries = {field: self.reader.entries[name] for field, name in names.items()}
        if not all(isinstance(entry, TensorEntry) for entry in entries.values()):
            return None  # already in memory
        shapes = {field: entry.shape for field, entry in entries.items()}
        sliced = {field for field, size in shapes.items() if size[:1] == shape[:1]} & BY_OUTPUT
        if self.quant.layout != COMPRESSED or names.keys() - sliced - {STATED_SHAPE}:
            return None
        tensors = {field: self._read.get_rows(names[field], ranges) for field in sorted(sliced)}
        rows = sum(stop - start for start, stop in ranges)
        if STATED_SHAPE in names:
            stated = self._read.get(names[STATED_SHAPE])
            if stated.tolist() != list(shape):
                return None
            tensors[STATED_SHAPE] = torch.tensor([rows, shape[1]], dtype=stated.dtype)
        self._used.update(names.values())
        weight = decode_linear(module, tensors, self.quant)
        _check_shape(module, (rows, shape[1]), (weight.out_features, weight.in_features))
        return weight

    def _dense(self, module: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a quantized linear's weight as floats, [N, K]."""
        weight = decode_dense(module, self._tensors(module), self.quant)
        if self.digests is not None:
            self.digests.tensor(f"{module}.weight", weight.weight_NK)
        _check_shape(module, shape, (weight.out_features, weight.in_features))
        return weight.weight_NK

    def _tensors(self, module: str, *, shared: bool = False) -> dict[str, torch.Tensor]:
        """Return a quantized linear's tensors, by the field names of `decode_linear`.

        `shared`: as in ReadAhead.get.
        """
        if self.quant is None:
            raise CheckpointError(
                module,
                "has quantized tensors such as qweight, but config.json has no quantization_config",
                COPY_BLOCK,
            )
        names = tensor_names(module, layout_of(self.quant), self.reader.entries)
        self._used.update(names.values())
        return {field: self._read.get(name, shared=shared) for field, name in names.items()}

    def kv_scales(self, attention: str) -> dict[str, torch.Tensor]:
        """Return the k_scale and v_scale of a layer, if present. Raises CheckpointError."""
        scales = {}
        for kind, found in find_kv_scales(attention, self).items():
            self._used.update(found)
            if found:
                scale = self._read.get(found[0])
                check_kv_scale(found[0], scale, self.quant is not None and self.quant.kv_per_head)
                # one number for the layer, or one per KV head [J]
                scales[kind] = scale.float().reshape(-1).squeeze()
        stated = self.quant is not None and self.quant.kv_cache is not None
        if stated and len(scales) == 1:
            raise CheckpointError(
                attention,
                f"expected a k_scale and a v_scale, found {next(iter(scales))} alone",
                "calibrate again",
            )
        return scales

    def __contains__(self, name: str) -> bool:
        return name in self.reader

    def audit(self, unread: tuple[str, ...] = (), without: Collection[str] = ()) -> None:
        """End reading. Raises CheckpointError if tensors were not used, or are not finite.

        `unread`: name prefixes of tensors that other ranks use. `without`: modules that they use.
        """
        self._read.close()
        self._finite.check()
        if self.reader.num_other_parts:
            logger.info(
                "%s: loading only the text model; skipping %d tensors of its other parts",
                self.reader.folder,
                self.reader.num_other_parts,
            )
        if self.reader.gguf_summary:
            logger.info("%s", self.reader.gguf_summary)
        if self.reader.unties_head:
            logger.warning(
                "%s: config.json states a tied head, but lm_head differs from the embedding; using"
                " lm_head (set tie_word_embeddings to false)",
                self.reader.folder,
            )
        if self.quant is not None and self.quant.unrounded_inputs:
            logger.warning(
                "%s: activations are %s, for which there is no kernel; they stay in 16 bits, and"
                " only the weights are quantized",
                self.reader.folder,
                self.quant.unrounded_inputs,
            )
        if self._mislabelled:
            logger.warning(
                "%s: checkpoint_format states %s zeros, but the data of %d linears contradicts it;"
                " loading them according to the data",
                self.reader.folder,
                self.quant.zeros,
                self._mislabelled,
            )
        # Indexers are not read if contexts are short. Draft layers, whose numbers follow those of
        # the model's layers, have indexers too.
        indexer, blocks = self.family.indexer, self.family.block_indexer
        modules = [] if indexer is None else [f".{indexer.module}."]
        modules += [] if blocks is None else [f".{module}." for module in blocks.modules]
        left = {
            name
            for name in self.reader.entries.keys() - self._used
            if not name.endswith(DERIVED)
            and not name.startswith((*self._unread, *unread))
            and name.rpartition(".")[0] not in without
            and not any(module in name for module in modules)
            and not self._is_zero_bias(name)
        }
        if self._tied_head:
            left.discard(self.family.head)  # some writers store the tied head again
        if left:
            some = ", ".join(sorted(left)[:4])
            raise CheckpointError(
                str(self.reader.folder),
                f"has {count_text(len(left), 'tensor')} that no layer of the model uses, such as"
                f" {some}",
                "check that config.json and the weights belong together",
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Return True for a bias of zeros. Old GPTQ writers gave such a bias to every linear."""
        return name.endswith(".bias") and not self.reader.get(name).any()


def _check_shape(module: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if found != tuple(expected):
        raise CheckpointError(
            module, f"expected {list(expected)} from config.json, found {list(found)}", OTHER_CONFIG
        )
