"""Student: a quantized checkpoint with trainable scales and norm weights, and optionally codes.

Legend:
N: outputs, K: inputs, G: groups, L: inputs of a group
B: windows, S: tokens of a window, R: rows
D: hidden size, V: vocabulary
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch.func import functional_call

from calibrate.calibration.layer_runner import LayerRunner, Rounding
from calibrate.calibration.vision import Media
from calibrate.layer import FinishedLayer
from calibrate.layer_map import find_layer_map
from calibrate.solvers.norms import TrainableNorms
from calibrate.solvers.solving import LayerState
from calibrate.solvers.tuning import places_of_codes, rounded_codes
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.in_memory.packed import PackedWeight
from formats.layouts import (
    decode_dense,
    decode_linear,
    has_input_factors,
    is_quantized,
    layout_of,
    modules_of,
    tensor_names,
)
from formats.quant_config import QuantConfig, find_block

# Relative error above which codes cannot stem from a weight; rounding to 2 bits causes about 0.5.
MAX_ROUNDING = 0.8


class TrainableLinear(nn.Module):
    """One linear with integer codes and trainable scales, and optionally trainable codes."""

    def __init__(
        self, packed: PackedWeight, device: str, weight_NK: torch.Tensor | None = None
    ) -> None:
        """`weight_NK`: the float weight, where codes start; None: codes are not trained."""
        super().__init__()
        self.packed = packed
        order_K = packed.input_order
        self.place_K = None if order_K is None else order_K.argsort().to(device)
        codes_NGL = packed.codes().unflatten(1, (packed.num_groups, -1))
        self.codes_NGL = codes_NGL.to(device)  # uint8
        self.zeros_NG1 = packed.zeros_NG[..., None].to(device)
        self.scales_NG = packed.scales_NG.float().to(device)
        # Relative change of the scale, so that scales of all sizes take equal steps
        self.gain_NG = nn.Parameter(torch.zeros_like(self.scales_NG))
        self.move_NGL: nn.Parameter | None = None  # change of the codes, in units of codes
        if weight_NK is not None:
            weight_NK = weight_NK.to(device)
            self._places_NGL = places_of_codes(
                self.codes_NGL.float(),
                self.scales_NG[..., None],
                self.zeros_NG1.float(),
                weight_NK if order_K is None else weight_NK[:, order_K.to(device)],
            )
            self.move_NGL = nn.Parameter(torch.zeros_like(self._places_NGL))

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [N, K] that a server computes with, before scales are rounded."""
        scales_NG1 = (self.scales_NG * (1 + self.gain_NG))[..., None].to(dtype)
        steps_NGL = self._codes().to(dtype) - self.zeros_NG1.to(dtype)
        weight_NK = (steps_NGL * scales_NG1).flatten(1)
        return weight_NK if self.place_K is None else weight_NK[:, self.place_K]

    def use_stored(self) -> None:
        """Round scales and codes to the stored form, and make these the new starting values.

        A scale that the stored dtype cannot represent keeps its old value.
        """
        old_NG = self.packed.scales_NG
        with torch.no_grad():
            new_NG = (self.scales_NG * (1 + self.gain_NG)).cpu().to(old_NG.dtype)
            self.codes_NGL = self._codes().to(torch.uint8)
        scales_NG = torch.where(new_NG.isfinite() & (new_NG != 0), new_NG, old_NG)
        if self.move_NGL is None:
            self.packed = replace(self.packed, scales_NG=scales_NG)
        else:
            spec, zeros_NG = self.packed.spec, self.packed.zeros_NG
            found = PackedWeight.from_codes(
                self.codes_NGL.flatten(1).cpu(), scales_NG, zeros_NG, spec
            )
            self.packed = replace(
                found,
                activation=self.packed.activation,
                input_scale=self.packed.input_scale,
                input_order=self.packed.input_order,
            )
            self._places_NGL = self.codes_NGL.float()
            self.move_NGL.data.zero_()
        self.scales_NG = scales_NG.float().to(self.scales_NG.device)
        self.gain_NG.data.zero_()

    def _codes(self) -> torch.Tensor:
        """Codes [N, G, L]: uint8, or floats with a gradient if they are trained."""
        if self.move_NGL is None:
            return self.codes_NGL
        return rounded_codes(self._places_NGL + self.move_NGL, self.packed.spec.max_code)


class StudentLayer:
    """A decoder layer: its module without the linears' weights, and the trainable parameters."""

    def __init__(
        self,
        runner: LayerRunner,
        layer: int,
        linears: dict[str, TrainableLinear],
        others: LayerState,
    ) -> None:
        """`others`: all tensors of the layer that are not trained, and the norms."""
        self.runner, self.layer, self.linears = runner, layer, linears
        self.norms = TrainableNorms(runner.layer_map, others).to(runner.device)
        of_linears = {  # placeholders without memory: run() passes the weights
            f"{name}.weight": torch.empty((), dtype=runner.dtype, device=runner.device).expand(
                each.packed.out_features, each.packed.in_features
            )
            for name, each in linears.items()
        }
        packed = {name: each.packed for name, each in linears.items()}
        roundings = FinishedLayer(packed=packed, changed={}, reports=()).roundings()
        self._module = runner.build(
            layer,
            {**others, **of_linears},
            {name: _straight_through(rounding) for name, rounding in roundings.items()},
        )

    def parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
        """Return the trainable parameters of (scales, norms, codes)."""
        linears = self.linears.values()
        codes = [each.move_NGL for each in linears if each.move_NGL is not None]
        return [each.gain_NG for each in linears], list(self.norms.parameters()), codes

    def run(self, hidden_BSD: torch.Tensor, grad: bool = False, media: Media = ()) -> torch.Tensor:
        """Return the layer's outputs. With `grad`, its parameters and the input get gradients.

        `media`: images of each window, or (): no images.
        """
        dtype = self.runner.dtype
        with torch.set_grad_enabled(grad):
            weights = {f"{n}.weight": each.weight(dtype) for n, each in self.linears.items()}
            weights |= {n: w.to(dtype) for n, w in self.norms.weights().items()}

        def call(*args: object, **kwargs: object) -> object:
            return functional_call(self._module, weights, args, kwargs)

        return self.runner.run(call, self.layer, hidden_BSD, grad=grad, media=media)


class Student:
    """A quantized checkpoint on one device: trainable layers, fixed embedding and head."""

    def __init__(
        self,
        reader: CheckpointReader,
        device: str,
        axis_rotary: nn.Module | None = None,
        original: Callable[[int, str], torch.Tensor] | None = None,
    ) -> None:
        """`axis_rotary`: see LayerRunner. `original`: returns the float weight of a linear by its
        layer and its name in it, to train codes from; None: codes are fixed.

        Raises CheckpointError or InputError, naming the tensor that cannot be trained.
        """
        self.reader, self._original = reader, original
        block = find_block(self.reader.folder, self.reader.config)
        if block is None:
            raise InputError(
                str(reader.folder), "is not quantized", "give a folder of `qserve quantize`"
            )
        self.config = QuantConfig.from_dict(block)
        self.layer_map = find_layer_map(self.reader.config)
        self.runner = LayerRunner(self.reader, self.layer_map, device, axis_rotary)
        self.device = device
        self.layers = [
            self._layer(number) for number in range(self.layer_map.num_layers(self.reader.config))
        ]
        self.norm_D = reader.get(self.layer_map.last_norm).to(device)
        tied = self.layer_map.tied_head(reader.config)
        head = self._matrix(self.layer_map.embedding if tied else self.layer_map.head)
        self.head_VD = head.to(device, self.runner.dtype)
        if not any(layer.linears for layer in self.layers):
            raise InputError(
                str(reader.folder),
                "has no integer codes, whose scales could be trained",
                "give a checkpoint of an integer scheme",
            )

    @property
    def embedding(self) -> torch.Tensor:
        return self._matrix(self.layer_map.embedding)

    def logits(self, rows_RD: torch.Tensor, grad: bool = False) -> torch.Tensor:
        """Return logits [R, V] for outputs of the last layer."""
        return self.runner.final_logits(rows_RD, self.norm_D, self.head_VD, grad=grad)

    def stored(self, module: str) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
        """Return (full names, tensors) of a quantized module as stored, both by local name."""
        names = tensor_names(module, layout_of(self.config), self.reader.entries)
        return names, {field: self.reader.get(name) for field, name in names.items()}

    def finish(self) -> tuple[dict[str, PackedWeight], LayerState]:
        """Round all trained values to the stored form; later outputs use the rounded values.

        Returns (linears, weights of norms), by full name.
        """
        linears, norms = {}, {}
        for layer in self.layers:
            prefix = self.layer_map.prefix(layer.layer)
            for local, each in layer.linears.items():
                each.use_stored()
                linears[f"{prefix}.{local}"] = each.packed
            layer.norms.use_stored()
            for local, weight in layer.norms.stored.items():
                norms[f"{prefix}.{local}"] = weight.cpu()
        return linears, norms

    def _layer(self, number: int) -> StudentLayer:
        prefix, entries = self.layer_map.prefix(number), self.reader.entries
        local = self.reader.children(prefix)
        groups = self.layer_map.inputs(self.reader.config, number)
        known = {name for group in groups for name in group}
        linears: dict[str, TrainableLinear] = {}
        others: LayerState = {}
        read: set[str] = set()
        for module in modules_of(local):
            full = f"{prefix}.{module}"
            if not is_quantized(full, entries):
                continue
            if module not in known or has_input_factors(full, entries):
                raise CheckpointError(
                    full,
                    "its scales cannot be trained: it holds stacked experts or factors for its"
                    " inputs",
                    "leave the checkpoint as it is",
                )
            names, tensors = self.stored(full)
            read |= {name.removeprefix(f"{prefix}.") for name in names.values()}
            weight = decode_linear(full, tensors, self.config)
            if "bias" in tensors:
                others[f"{module}.bias"] = tensors["bias"].to(self.device)
            if isinstance(weight, PackedWeight):
                linears[module] = TrainableLinear(
                    weight, self.device, self._near(number, module, weight)
                )
            else:
                dense = decode_dense(full, tensors, self.config).dequantize()
                others[f"{module}.weight"] = dense.to(self.device, self.runner.dtype)
        others |= {
            name: self.reader.get(f"{prefix}.{name}").to(self.device)
            for name in local
            if name not in read
        }
        return StudentLayer(self.runner, number, linears, others)

    def _near(self, layer: int, linear: str, packed: PackedWeight) -> torch.Tensor | None:
        """Return the float weight of a linear if its codes are trained, else None.

        Raises InputError if the codes do not stem from that weight.
        """
        if self._original is None:
            return None
        weight_NK = in_basis_of(packed, self._original(layer, linear).float())
        if weight_NK is None:
            raise InputError(
                f"{self.layer_map.prefix(layer)}.{linear}",
                "its codes cannot be trained: before rounding, a transform that quality.json does"
                " not name changed the float weight",
                "train scales and norms only: leave out --code-rate",
            )
        return weight_NK

    def _matrix(self, name: str) -> torch.Tensor:
        module = name.removesuffix(".weight")
        if not is_quantized(module, self.reader.entries):
            return self.reader.get(name)
        _, tensors = self.stored(module)
        return decode_dense(module, tensors, self.config).dequantize()


def in_basis_of(packed: PackedWeight, weight_NK: torch.Tensor) -> torch.Tensor | None:
    """Rescale a float weight by the row and column factors that transforms such as AWQ applied.

    Returns None if the remaining difference from `packed` is larger than rounding can explain.
    """
    found_NK = packed.dequantize().to(weight_NK.device)
    for _ in range(2):
        for dim in (0, 1):  # the factor of each column, then of each row, by least squares
            size = weight_NK.square().sum(dim, keepdim=True)
            factor = (found_NK * weight_NK).sum(dim, keepdim=True) / size.clamp(min=1e-30)
            weight_NK = weight_NK * torch.where(size > 0, factor, 1.0)
    difference = (found_NK - weight_NK).norm() / found_NK.norm().clamp(min=1e-30)
    return weight_NK if float(difference) < MAX_ROUNDING else None


def _straight_through(rounding: Rounding) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the rounding with a straight-through gradient (that of the identity)."""

    def apply(x: torch.Tensor) -> torch.Tensor:
        return x + (rounding(x.detach()) - x.detach())

    return apply
