"""Random weights in the shapes that a builder requests: `--load-format dummy`."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from formats.in_memory.dense import is_dense
from formats.in_memory.fp4 import Fp4Weight
from formats.in_memory.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.in_memory.k_weight import KWeight, is_in_blocks
from formats.in_memory.packed import PackedWeight
from formats.in_memory.weights import Weight
from formats.scheme import FP4_TYPES
from qserve.model.loading.digest_threads import DigestThreads
from qserve.model.loading.read_ahead import Ranges
from qserve.model.model_config import ModelConfig

# Standard deviation of random weights; keeps activations in range through any number of layers.
DUMMY_SCALE = 0.02
# The scale byte of 2^-7, since uniform 4-bit floats have a standard deviation of 2.9.
MXFP4_SCALE = 120
MXFP4_TENSORS = ("_blocks", "_scales")  # suffixes of the tensors of gpt-oss's experts


class DummySource:
    """Source of random weights. Equal seeds give equal weights."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self.quant = config.quant
        self.device = device
        self.digests: DigestThreads | None = None  # random weights have no digests
        self._has_mxfp4_experts = config.mxfp4_experts
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Sequence[int] | None = None,
        *,
        integers: bool = False,
    ) -> torch.Tensor:
        """Return a random tensor. `rows`: rows of `shape` to return; None: all."""
        if rows is not None:
            shape = (len(rows), *shape[1:])
        if name in self:  # MXFP4 tensors of all experts
            if name.endswith(MXFP4_TENSORS[1]):
                return torch.full(shape, MXFP4_SCALE, dtype=torch.uint8, device=self.device)
            sizes = {"device": self.device, "generator": self._generator}
            return torch.randint(0, 256, shape, dtype=torch.uint8, **sizes)
        if integers:  # a table of experts: different ones for a token
            return torch.arange(shape[-1], device=self.device).expand(shape).clone()
        if "norm" in name and not name.endswith(".bias"):
            return torch.ones(shape, device=self.device)
        noise = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return noise.normal_(0, DUMMY_SCALE, generator=self._generator)

    def is_quantized(self, module: str) -> bool:
        scheme = None if self.quant is None else self.quant.scheme_for(module)
        return scheme is not None and not is_dense(scheme.weight)

    def stays_in_float(self, module: str) -> bool:
        return not self.is_quantized(module)

    def has_linear(self, module: str) -> bool:
        """Return True only for quantized linears. Random float experts have the fused form."""
        return self.is_quantized(module)

    def check_has_experts(self, prefix: str, modules: Iterable[str]) -> None:
        """Do nothing: a random source has all tensors."""

    def input_order(self, module: str, shape: tuple[int, int]) -> None:
        """Return None: no linear has sorted inputs."""

    def decode_together(self, modules: Mapping[str, tuple[int, int]]) -> None:
        """Do nothing: random weights are not decoded."""

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        scheme = self.quant.scheme_for(module)
        spec, device = scheme.weight, self.device
        spec.check_shape(module, *shape)
        sizes = {"device": device, "generator": self._generator}
        input_scale = None
        if scheme.activation is not None and not scheme.activation.dynamic:
            input_scale = torch.tensor(DUMMY_SCALE, device=device)
        if is_in_blocks(spec):
            return KWeight.random(shape, spec, DUMMY_SCALE, self._generator)
        if spec.type in FP4_TYPES:
            noise = torch.empty(shape, device=device)
            noise.normal_(0, DUMMY_SCALE, generator=self._generator)
            weight = Fp4Weight.from_float(noise, spec, module)
            return replace(weight, activation=scheme.activation, input_scale=input_scale)
        if spec.type == "float":
            noise = torch.empty(shape, device=device).normal_(generator=self._generator)
            return Fp8Weight(
                codes_NK=noise.to(FP8_DTYPE),
                scales_RC=torch.full(scales_shape(spec, *shape), DUMMY_SCALE, device=device),
                spec=spec,
                activation=scheme.activation,
                input_scale=input_scale,
            )
        words = shape[1] * spec.bits // 32
        # Uniform codes have a standard deviation of 2^bits / sqrt(12).
        scale = DUMMY_SCALE * 12**0.5 / 2**spec.bits
        groups = (shape[0], spec.num_groups(shape[1]))
        return PackedWeight(
            words_NW=torch.randint(-(2**31), 2**31, (shape[0], words), dtype=torch.int32, **sizes),
            scales_NG=torch.full(groups, scale, dtype=torch.float16, device=device),
            zeros_NG=torch.full(groups, spec.symmetric_zero, dtype=torch.uint8, device=device),
            spec=spec,
            in_features=shape[1],
            activation=scheme.activation,
            input_scale=input_scale,
        )

    def float_rows(self, module: str, shape: tuple[int, int], ranges: Ranges) -> None:
        """Return None: ranks draw the same random numbers, so each must draw the whole linear."""

    def weight_rows(self, module: str, shape: tuple[int, int], ranges: Ranges) -> None:
        """Return None, for the same reason as `float_rows`."""

    def __contains__(self, name: str) -> bool:
        """Return True for tensors of MXFP4 experts, which builders detect by tensor names."""
        return self._has_mxfp4_experts and name.endswith(MXFP4_TENSORS)

    def kv_scales(self, attention: str) -> dict[str, torch.Tensor]:
        return {}

    def expect(self, prefix: str, without: Collection[str] = ()) -> None:
        """Do nothing: no file is read."""

    def audit(self, unread: tuple[str, ...] = (), without: Collection[str] = ()) -> None:
        """Do nothing: no tensor can be left over."""
