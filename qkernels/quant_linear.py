"""QuantLinear: a linear layer with quantized weights, as a torch module.

Its state_dict holds exactly the tensors that a GPTQ checkpoint stores for a linear, or for 4-bit
floats those of compressed-tensors (stored_form.py). The first forward makes the kernel's copy of
the weight, which is never saved. Legend: N outputs, K inputs, G groups.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from formats.errors import CheckpointError
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight, round_to_nearest
from formats.names import SchemeName
from formats.numerics import affine
from formats.scheme import Scheme
from qkernels import ops
from qkernels.autocast import autocast_input, is_autocast, no_autocast
from qkernels.checks import check_numbers
from qkernels.compiled import LayerKey, compiled_linear
from qkernels.errors import KernelError
from qkernels.linear.autograd import FrozenLinear
from qkernels.linear.ops import gradient_weight, needs_gradient
from qkernels.linear.plan import GemmPlan
from qkernels.linear.prepared import PreparedWeight
from qkernels.lora.term import LoraTerm
from qkernels.operands.forms import LinearInput
from qkernels.operands.split_k import Consumer, LinearOutput
from qkernels.stored_form import (
    NAMES,
    StoredWeight,
    check_shape,
    check_storable,
    decode,
    empty_tensors,
    encode,
    is_empty,
    stored_names,
)

CODES = "packed codes or indices"  # in errors
Versions = tuple[tuple[torch.Tensor, int], ...]


class QuantLinear(nn.Module):
    """Linear layer y = x W^T + bias with a quantized W, for inference.

    x gets a gradient, which treats the rounding of x as the identity; the weight does not.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        scheme: SchemeName | str | Scheme,
        bias: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        """Create an empty layer; `load_state_dict` fills it.

        `device` None: torch's default device, as for nn.Linear. A layer on the meta device needs
        `load_state_dict(..., assign=True)`.
        """
        self._start(in_features, out_features, Scheme.parse(scheme))
        check_storable(self.scheme, "QuantLinear")
        check_shape(self.scheme, "QuantLinear", out_features, in_features)
        for name, tensor in self._empty_tensors(device).items():
            setattr(self, name, tensor)
        if bias:
            self.bias = torch.zeros(out_features, dtype=torch.float16, device=device)

    def _start(self, in_features: int, out_features: int, scheme: Scheme) -> None:
        """Initialize a layer without tensors."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        # made by prepare() from these tensors; made again if they change
        self._prepared: PreparedWeight | None = None
        self._prepared_from: Versions = ()
        self._prepared_bias: torch.Tensor | None = None
        self._released = False
        self._key = LayerKey(self)  # names the layer in compiled graphs
        for name in (*NAMES, "bias"):
            self.register_buffer(name, None)

    @classmethod
    def from_float(
        cls,
        linear_or_weight: nn.Linear | torch.Tensor,
        scheme: SchemeName | str | Scheme,
        bias: torch.Tensor | None = None,
        name: str = "weight",
    ) -> "QuantLinear":
        """Round a float weight to nearest, to the same bits as `qserve quantize --recipe rtn`.

        `scheme` may state the group size ("w4a16-sym-g64"). The default is 128, which must divide
        K. A torch Linear's own bias is used unless `bias` is given. `name` is the layer's name in
        errors.

        A weight that already lies on a quantization grid stays on it only if rounding chooses the
        same scales: `off_grid` measures the difference. `from_codes` keeps any grid.
        """
        weight_NK = linear_or_weight
        if isinstance(linear_or_weight, nn.Linear):
            weight_NK = linear_or_weight.weight
            bias = linear_or_weight.bias if bias is None else bias
        check_numbers(name, weight_NK, "a torch.nn.Linear or a weight [N, K]")
        scheme = Scheme.parse(scheme)
        check_storable(scheme, name)
        if weight_NK.ndim == 2:
            check_shape(scheme, name, *weight_NK.shape)
        with no_autocast(weight_NK):
            packed = round_to_nearest(weight_NK.detach(), scheme.weight, name)
        return cls.from_packed(replace(packed, activation=scheme.activation), bias)

    @classmethod
    def from_codes(
        cls,
        codes_NK: torch.Tensor,
        scales_NG: torch.Tensor,
        zeros_NG: torch.Tensor | None = None,
        *,
        scheme: SchemeName | str | Scheme,
        bias: torch.Tensor | None = None,
    ) -> "QuantLinear":
        """Store a solver's codes unchanged: unsigned codes [N, K], scales and zero points [N, G].

        `zeros_NG` None: symmetric. The group size is K / G; `scheme` may state it ("w4a16-sym-g64")
        or not ("w4a16-sym"). Raises InputError if shapes or values do not fit the scheme, and
        RangeError if float16, the dtype of scales in files, cannot hold a scale.
        """
        if all(isinstance(t, torch.Tensor) and t.ndim == 2 for t in (codes_NK, scales_NG)):
            if len(scales_NG) != len(codes_NK):
                found = f"expected [{len(codes_NK)}, groups], found {list(scales_NG.shape)}"
                remedy = f"give a row of scales for each row of the codes {list(codes_NK.shape)}"
                raise KernelError("scales", found, remedy)
            scheme = Scheme.of_scales(scheme, scales_NG.shape[1], codes_NK.shape[1])
        scheme = Scheme.parse(scheme)  # `from_codes` below checks the tensors against it
        packed = PackedWeight.from_codes(codes_NK, scales_NG, zeros_NG, scheme.weight)
        packed.check_range()
        return cls.from_packed(replace(packed, activation=scheme.activation), bias)

    @classmethod
    def for_inference(
        cls,
        weight: Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        kernel: str | None = None,
    ) -> "QuantLinear":
        """Create a layer that can only run, as after `prepare(release=True)`.

        It holds any kind of weight, also kinds that QuantLinear's tensors cannot store.
        """
        layer = cls.__new__(cls)
        layer._start(weight.in_features, weight.out_features, weight.scheme)
        layer._prepared = ops.prepare_weight(weight, dtype, device, kernel)
        if bias is not None:
            layer.bias = bias.detach().to(layer._prepared.device)
            layer._prepared_bias = layer.bias.to(dtype)
        layer._released = True
        return layer

    @classmethod
    def from_packed(cls, packed: StoredWeight, bias: torch.Tensor | None = None) -> "QuantLinear":
        """Create a layer from a packed weight.

        Raises InputError if its format cannot store the weight, and for a bias that is no finite
        tensor [N].
        """
        packed.check()
        if bias is not None:
            _check_bias(bias, packed.out_features)
        check_storable(packed.scheme, "QuantLinear")
        check_shape(packed.scheme, "QuantLinear", packed.out_features, packed.in_features)
        layer = cls.__new__(cls)
        layer._start(packed.in_features, packed.out_features, packed.scheme)
        for name, tensor in encode(packed).items():
            setattr(layer, name, tensor)
        if bias is not None:
            layer.bias = bias.detach().clone().to(packed.device)
        return layer

    @property
    def prepared_weight(self) -> PreparedWeight:
        """Weight in the kernel's layout. Raises KernelError if the layer is not prepared."""
        if self._prepared is None:
            raise KernelError("QuantLinear", "the layer is not prepared", "call prepare() first")
        return self._prepared

    def plan(
        self,
        rows: int,
        consumer: Consumer | None = None,
        adapted: tuple[int, ...] | None = None,
    ) -> GemmPlan:
        """Return the plan of `forward` for M = `rows`: kernel, input form and output form.

        `consumer` names the one operation that reads the result; with it, the output may be split-K
        partial sums. `adapted` is an argument of ops.plan_linear. Raises KernelError if the layer
        is not prepared.
        """
        if adapted is None:
            return ops.plan_linear(self.prepared_weight, rows, consumer)
        return ops.plan_linear(self.prepared_weight, rows, consumer, adapted=adapted)

    def forward(
        self,
        x: LinearInput,
        plan: GemmPlan | None = None,
        term: LoraTerm | None = None,
        out: torch.Tensor | None = None,
    ) -> LinearOutput:
        """Return x W^T + bias.

        A tensor x [..., K] gives [..., N] in x's dtype. Codes or Limbs give [M, N] in the dtype
        that the weight was prepared for. With a plan, x must have the form `plan.input`, and the
        result has the form `plan.output`. A LoRA `term` needs a plan that adds adapters. `out`: an
        argument of ops.linear.

        Without a plan, autocast casts x first, as for nn.Linear; torch.compile sees one operation.
        """
        if plan is None and isinstance(x, torch.Tensor) and torch.compiler.is_compiling():
            return compiled_linear(autocast_input(x), self, self._key)
        if plan is None and isinstance(x, torch.Tensor) and is_autocast(x):
            x = autocast_input(x)
            with no_autocast(x):
                return self.forward(x, plan, term, out)
        prepared, bias = self._prepared, self._prepared_bias
        if isinstance(x, torch.Tensor):
            if (
                prepared is None
                or (prepared.dtype, prepared.device) != (x.dtype, x.device)
                # another thread may be preparing the layer for another dtype
                or (bias is not None and (bias.dtype, bias.device) != (x.dtype, x.device))
                or not (self._released or self._is_current())
            ):
                prepared, bias = self._prepare(x.dtype, x.device)
        elif prepared is None or hasattr(x, "__array__"):
            check_numbers("linear x", x, "a tensor, or codes or limbs of a prepared layer")
        if term is not None or out is not None:
            return ops.linear(x, prepared, bias, plan, term, out)
        if (
            plan is None
            and isinstance(x, torch.Tensor)
            and prepared.activation is not None
            and not self._released
            and needs_gradient(x)
        ):
            weight = partial(self.gradient_weight, x.dtype, x.device, self._prepared_from)
            return FrozenLinear.apply(x, lambda x: ops.linear(x, prepared, bias), weight)
        return ops.linear(x, prepared, bias, plan)

    def prepare(
        self,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        release: bool = False,
        kernel: str | None = None,
    ) -> "QuantLinear":
        """Make the kernel's copy of the weight for activations of `dtype` on `device`; return self.

        `kernel` requests a kernel by name, or forbids some (ops.prepare_weight). Without this call,
        the first forward prepares the layer, which a CUDA graph capture does not allow. On CUDA the
        call waits for the copy, so that forwards on any stream may follow. A forward after a change
        of the stored tensors prepares the layer again. Call `prepare` yourself after changes that
        torch does not count: those through `.data`, and of tensors made in inference mode.

        `release` frees the stored tensors afterwards. Then the layer can only run: state_dict,
        packed and dequantize raise KernelError.
        """
        self._prepare(dtype, device, kernel)
        if release:
            self._released = True
            self._prepared_from = ()
            for name in NAMES:
                setattr(self, name, None)
        return self

    def _prepare(
        self, dtype: torch.dtype, device: torch.device | str | None, kernel: str | None = None
    ) -> tuple[PreparedWeight, torch.Tensor | None]:
        """Make the kernel's copy; return it and the bias, which other threads may replace."""
        # a later forward that needs x's gradient could not use tensors made in inference mode
        with torch.inference_mode(False), torch.no_grad():
            versions = tuple(self._versions())
            prepared = ops.prepare_weight(self.packed(), dtype, device, kernel)
            bias = None if self.bias is None else self.bias.to(prepared.device, dtype)
        if prepared.device.type == "cuda":
            torch.cuda.current_stream(prepared.device).synchronize()
        self._prepared, self._prepared_bias = prepared, bias
        self._prepared_from = versions
        return prepared, bias

    def stored_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that determine the output: the stored ones and the bias."""
        return [tensor for tensor in self._buffers.values() if tensor is not None]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> "QuantLinear":
        """Return a layer like this one with other tensors, in the order of `stored_tensors`."""
        layer = QuantLinear.__new__(QuantLinear)
        layer._start(self.in_features, self.out_features, self.scheme)
        names = [name for name, own in self._buffers.items() if own is not None]
        for name, tensor in zip(names, tensors, strict=True):
            setattr(layer, name, tensor)
        return layer

    def _drop_prepared(self) -> None:
        self._prepared = self._prepared_bias = None
        self._prepared_from = ()

    def _versions(self) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the stored tensors and the numbers of their changes in place."""
        for tensor in self._buffers.values():
            if tensor is not None:
                yield tensor, 0 if tensor.is_inference() else tensor._version

    def _is_current(self, made_from: Versions | None = None) -> bool:
        """Return True if no stored tensor has changed since `prepare`, or since `made_from`."""
        before = self._prepared_from if made_from is None else made_from
        pairs = zip_longest(before, self._versions(), fillvalue=(None, 0))
        return all(old is new and before == now for (old, before), (new, now) in pairs)

    def packed(self) -> StoredWeight:
        """Return the weight in memory form.

        Raises CheckpointError if the layer is empty or damaged.
        """
        self._check_not_released()
        tensors = {name: getattr(self, name) for name in stored_names(self.scheme)}
        if any(tensor.is_meta for tensor in tensors.values()):
            raise CheckpointError(
                "QuantLinear",
                "is on the meta device, without numbers",
                "call load_state_dict(..., assign=True), or to_empty(device=...) before it",
            )
        if is_empty(tensors):
            raise CheckpointError(
                "QuantLinear",
                "is empty: no scale is set",
                "call load_state_dict, or make it with from_float or from_codes",
            )
        return decode(tensors, self.scheme)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized weight [N, K] in `dtype`."""
        return self.packed().dequantize(dtype)

    def gradient_weight(
        self, dtype: torch.dtype, device: torch.device, made_from: Versions | None = None
    ) -> torch.Tensor:
        """Return the weight [N, K] by which backward multiplies; `made_from`: tensors of forward.

        Raises KernelError if they changed since then, and for a layer without stored tensors whose
        scheme rounds inputs.
        """
        if self._released:
            return gradient_weight(self.prepared_weight)
        if made_from is not None and not self._is_current(made_from):
            found = "its tensors changed between forward and backward"
            raise KernelError("QuantLinear", found, "change them after backward")
        return self.dequantize(dtype).to(device)

    def off_grid(self, weight_NK: torch.Tensor) -> float:
        """Return the largest distance of a float weight [N, K] from this layer's grid.

        The unit is one grid step. 0: the layer computes with exactly this weight, even if another
        tool chose its codes.
        """
        check_numbers("weight", weight_NK, "a float weight [N, K]")
        packed = self.packed()
        if not isinstance(packed, PackedWeight):
            raise KernelError(
                "off_grid",
                f"expected integer codes, found {self.scheme}",
                "compare dequantize() with the weight",
            )
        if packed.input_order is not None:
            weight_NK = weight_NK[:, packed.input_order]
        weight_NK = weight_NK.to(packed.device)
        return affine.off_grid(weight_NK, packed.scales_NG, packed.zeros_NG, packed.spec)

    def extra_repr(self) -> str:
        kernel = "not prepared" if self._prepared is None else self._prepared.kernel
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" scheme={self.scheme}, bias={self.bias is not None}, kernel={kernel}"
        )

    def _empty_tensors(self, device: torch.device | str | None) -> dict[str, torch.Tensor]:
        """Return tensors without numbers that have the shapes of this layer."""
        return empty_tensors(self.scheme, self.out_features, self.in_features, device)

    def _check_not_released(self) -> None:
        if self._released:
            raise KernelError(
                "QuantLinear",
                "its stored tensors were released, so the layer can only run as it was prepared",
                "prepare the layer without release=True",
            )

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._check_not_released()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if problems := self._wrong_dtypes(state_dict, prefix):
            args[-1].extend(problems)  # torch's list of errors; `load_state_dict` raises it
            return
        if self._released:
            check_storable(self.scheme, "QuantLinear")
            self._released = False
            for name, tensor in self._empty_tensors(self._prepared.device).items():
                setattr(self, name, tensor)
        # torch copies into the buffer and would round the file's scales to the buffer's dtype
        for name in ("scales", "bias"):
            own, stored = getattr(self, name), state_dict.get(prefix + name)
            if own is not None and stored is not None and own.dtype != stored.dtype:
                setattr(self, name, own.to(stored.dtype))
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._drop_prepared()

    def _wrong_dtypes(self, state_dict: Mapping[str, Any], prefix: str) -> list[str]:
        """Return an error for each tensor that is stored in a dtype of another kind.

        torch would convert its numbers: packed codes that were cast to a float dtype are rounded,
        and bytes of float8 numbers are taken for integers.
        """
        return [
            f"{prefix}{name}: expected {own.dtype}, found {stored.dtype} (store it without a"
            f" conversion: it holds {'scales' if own.is_floating_point() else CODES})"
            for name in NAMES
            if (own := getattr(self, name, None)) is not None
            and (stored := state_dict.get(prefix + name)) is not None
            and own.is_floating_point() != stored.is_floating_point()
        ]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> "QuantLinear":
        """Apply .to() and .cuda() to the device only: every dtype is the checkpoint's and stays."""
        before = {name: getattr(self, name) for name in (*NAMES, "bias")}
        prepared = self._prepared
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new is not None and new.dtype != old.dtype:
                setattr(self, name, old.to(new.device))
        if self._released:
            device = fn(torch.empty(0, dtype=torch.int32, device=prepared.device)).device
            if device.type != prepared.device.type:
                self._check_not_released()
            self._prepared = prepared.to(device)
            if self._prepared_bias is not None:
                self._prepared_bias = self._prepared_bias.to(device)
        else:
            self._drop_prepared()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave the kernel's copy out of copies and pickles, unless it is the only copy."""
        state = super().__getstate__()
        state.pop("_key")
        made = {"_prepared": None, "_prepared_from": (), "_prepared_bias": None}
        return state if self._released else {**state, **made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._key = LayerKey(self)


def _check_bias(bias: torch.Tensor, out_features: int) -> None:
    check_numbers("bias", bias, f"a tensor [{out_features}] or None")
    if bias.shape != (out_features,):
        raise KernelError(
            "bias",
            f"expected [{out_features}], found {list(bias.shape)}",
            "pass one number per output",
        )
    if not torch.isfinite(bias).all():
        raise KernelError("bias", "contains NaN or infinity", "replace these values")
