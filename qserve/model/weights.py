"""A model's weights as its builder asks for them: on the device, merged and ready to run.

Every name and shape comes from the family's row. Legend: N outputs, K inputs, C hidden size, V
vocabulary.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from tqdm import tqdm

from formats.bare_model import SCORE
from formats.errors import CheckpointError, InputError
from formats.family import ATTENTION, Projection, Shape, is_set, size
from formats.weights import Weight, merge
from qkernels import QuantLinear, ops
from qkernels.moe.experts import PreparedExperts
from qserve.model.blocks.linear import FloatLinear, Linear, SplitLinear
from qserve.model.blocks.moe import Router
from qserve.model.blocks.rotary import Rotary
from qserve.model.dummy_source import DummySource
from qserve.model.expert_weights import expert_weights, routing_of
from qserve.model.model_config import ModelConfig
from qserve.model.rope import RopeConfig, cos_sin_table
from qserve.model.weight_source import WeightSource

logger = logging.getLogger(__name__)

Source = WeightSource | DummySource


class Weights:
    """Tensors and linears by name, from a checkpoint or at random. `audit` comes last."""

    def __init__(
        self,
        config: ModelConfig,
        source: Source,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_model_len: int,
        progress: bool = True,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        """`kernels`: kernels that were asked for or forbidden, by operation (EngineConfig)."""
        self.kernels = kernels or {}
        self.config, self.family, self.source = config, config.family, source
        self._sizes = config.sizes
        self.device, self.dtype, self.max_model_len = device, dtype, max_model_len
        self._progress = progress
        self._rotaries: list[tuple[RopeConfig | None, Rotary]] = []

    def embedding(self) -> torch.Tensor:
        """The table of tokens [V, C]."""
        return self._model_tensor(self.family.embedding)

    def last_norm(self) -> torch.Tensor:
        """The factors [C] of the norm before the head."""
        return self.norm(self.family.last_norm, (self.config.hidden_size,))

    def head(self, embedding_VC: torch.Tensor) -> Linear:
        """The output head: one of its own, or the embedding."""
        name = self.family.head.removesuffix(".weight")
        if self.config.tied_head and not self.source.is_quantized(name):
            return FloatLinear(embedding_VC)
        return self.linear([name], [self.config.vocab_size], self.config.hidden_size)

    def classifier(self) -> torch.Tensor | None:
        """A classifier's matrix [labels, C], where the checkpoint has one."""
        if self.config.instead_of_head != SCORE:
            return None
        return self.tensor(SCORE, (len(self.config.labels), self.config.hidden_size))

    def layers(self) -> Iterator["LayerWeights"]:
        """Those of each layer in turn."""
        numbers = range(self.config.num_layers)
        for number in tqdm(numbers, desc="Loading layers", disable=not self._progress):
            for next_number in (number, number + 1):
                if next_number < self.config.num_layers:
                    self.source.expect(self.family.layer.format(i=next_number))
            yield LayerWeights(self, number)

    def rotary(self, rope: RopeConfig | None) -> Rotary:
        """The rotations of all positions, one table for layers alike; None: of no channel."""
        for known, rotary in self._rotaries:
            if known == rope:
                return rotary
        if rope is None:
            rotary = Rotary(torch.empty(self.max_model_len, 0, device=self.device))
        else:
            table = cos_sin_table(rope, self.max_model_len, self.device)
            rotary = Rotary(table, rope.interleaved)
        self._rotaries.append((rope, rotary))
        return rotary

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor. Raises CheckpointError where it is missing or has another shape."""
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """What a norm multiplies by: the tensor, plus 1 in families that store it without.

        In float32 where the family rounds after the product alone (ops.rms_norm).
        """
        stored = self.source.tensor(name, shape).to(self.device, torch.float32)
        dtype = torch.float32 if self.family.float32_norms else self.dtype
        return (stored + self.family.norm_offset).to(dtype)

    def linear(
        self, names: Sequence[str], outs: Sequence[int], ins: int, *, bias: bool = False
    ) -> Linear:
        """One layer of `ins` inputs from linears with so many outputs each, side by side.

        Members that the checkpoint quantizes differently stay apart. Raises CheckpointError where
        only some are quantized and the configuration does not say so.
        """
        quantized = {name for name in names if self.source.is_quantized(name)}
        rest = [name for name in names if name not in quantized]
        sizes = list(zip(names, outs, strict=True))
        biases = [self.tensor(f"{name}.bias", (n,)) if bias else None for name, n in sizes]
        if not quantized:
            weights = [self.tensor(f"{name}.weight", (n, ins)) for name, n in sizes]
            return FloatLinear(
                torch.cat(weights), torch.cat(biases) if bias else None, tuple(names)
            )
        if not all(self.source.stays_in_float(name) for name in rest):
            raise CheckpointError(
                ", ".join(names), f"only {', '.join(sorted(quantized))} of this group is quantized"
            )
        if not rest:
            parts = [self.source.weight(name, (n, ins)) for name, n in sizes]
            try:
                merged = merge(parts, names[0]) if len(parts) > 1 else parts[0]
            except CheckpointError as error:
                logger.info("%s stay apart: %s", ", ".join(names), error.problem)
                layers = [self._quantized(w, b) for w, b in zip(parts, biases, strict=True)]
                return SplitLinear(layers)
            return self._quantized(merged, torch.cat(biases) if bias else None)
        layers = []
        for (name, n), own_bias in zip(sizes, biases, strict=True):
            if name in quantized:
                layers.append(self._quantized(self.source.weight(name, (n, ins)), own_bias))
            else:
                weight = self.tensor(f"{name}.weight", (n, ins))
                layers.append(FloatLinear(weight, own_bias, (name,)))
        return SplitLinear(layers)

    def audit(self) -> None:
        """Raise CheckpointError, with the names, where tensors were left over."""
        self.source.audit()

    def shape(self, shape: Shape) -> tuple[int, ...]:
        """A row's shape in numbers."""
        return tuple(size(names, self._sizes) for names in shape)

    def _model_tensor(self, name: str) -> torch.Tensor:
        return self.tensor(name, self.shape(self.family.model_tensors[name]))

    def _quantized(self, weight: Weight, bias: torch.Tensor | None) -> QuantLinear:
        operation = f"w{weight.spec.bits}a16" if weight.activation is None else "w8a8"
        kernel = self.kernels.get(operation)
        return QuantLinear.for_inference(
            weight.to(self.device), bias, self.dtype, self.device, kernel
        )


class LayerWeights:
    """The same of one layer: names are those below it."""

    def __init__(self, weights: Weights, number: int) -> None:
        self.number = number
        self.rotary = weights.rotary(weights.config.ropes[number])
        self.kernels = weights.kernels
        self._weights, self._family = weights, weights.family
        self._prefix = weights.family.layer.format(i=number)

    def linear(self, projection: Projection) -> Linear:
        """The one matrix of a projection, however it is stored."""
        linears = projection.linears
        shapes = [self._weights.shape(linear.shape) for linear in linears]
        return self._weights.linear(
            [f"{self._prefix}.{linear.name}" for linear in linears],
            [n for n, _ in shapes],
            shapes[0][1],
            bias=is_set(projection.bias, self._weights.config.values),
        )

    def norm(self, name: str) -> torch.Tensor:
        """What a norm of the family's row multiplies by."""
        row = next(norm for norm in self._family.norms if norm.name == name)
        shape = self._weights.shape(((row.size,),))
        return self._weights.norm(f"{self._prefix}.{name}.weight", shape)

    def has_norm(self, name: str) -> bool:
        """Whether the model has a norm of the family's row."""
        config = self._weights.config.values
        return any(n.name == name and is_set(n.present, config) for n in self._family.norms)

    def router(self) -> Router:
        """What chooses the layer's experts."""
        experts, config = self._family.experts, self._weights.config.values
        rule, routing = experts.routing, routing_of(experts, config)
        E = routing.num_experts
        name = f"{self._prefix}.{experts.router}"
        shape = (E, self._weights.config.hidden_size)
        correction = None
        if rule.correction:
            stored = f"{self._prefix}.{experts.module}.{rule.correction}"
            correction = self._weights.source.tensor(stored, (E,)).to(
                self._weights.device, torch.float32
            )
        weight = self._weights.tensor(f"{name}.weight", shape)
        return Router(
            routing,
            weight.float() if rule.float32 else weight,
            self._weights.tensor(f"{name}.bias", (E,)) if rule.bias else None,
            correction,
        )

    def shared_gate(self) -> FloatLinear | None:
        """The gate of the layer's shared expert, where it has one."""
        shared = self._family.experts.shared
        if not shared.gate:
            return None
        name = f"{self._prefix}.{shared.gate}.weight"
        return FloatLinear(self._weights.tensor(name, (1, self._weights.config.hidden_size)))

    def experts(self) -> PreparedExperts:
        """The layer's experts, prepared for their kernel."""
        weights = self._weights
        found = expert_weights(weights, self._prefix)
        kernel = self.kernels.get("experts")
        prepared = ops.prepare_experts(found, weights.dtype, weights.device, kernel)
        if prepared.problem.kernel == "reference" and weights.device.type == "cuda" and not kernel:
            raise InputError(
                f"{self._prefix} experts",
                "no kernel takes them, and plain torch waits for the GPU after each choice",
                "give --kernel experts=reference and --enforce-eager to run them slowly",
            )
        return prepared

    def sinks(self) -> dict[str, torch.Tensor]:
        """The scores of each head that attention takes beside the keys', if the family has them."""
        if not self._family.sinks:
            return {}
        name, shape = f"{self._prefix}.{self._family.sinks}", (self._weights.config.num_heads,)
        found = self._weights.source.tensor(name, shape)
        return {"sinks": found.to(self._weights.device, torch.float32)}

    def kv_scales(self) -> dict[str, torch.Tensor]:
        """The k_scale and v_scale of a checkpoint calibrated for an 8-bit KV cache, if any."""
        scales = self._weights.source.kv_scales(f"{self._prefix}.{ATTENTION}")
        return {name: scale.to(self._weights.device) for name, scale in scales.items()}
