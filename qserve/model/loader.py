"""From a model folder to a Decoder on a device, one tensor group at a time. Ends with an audit.

The tensors of a layer are read, merged (q, k, v; gate, up), moved, prepared for their kernels and
dropped from the host before the next layer's. Every tensor of the folder must be used.
"""

import logging
from collections.abc import Callable

import torch
from tqdm import tqdm

from formats import gptq
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError
from formats.fp8 import FP8_DTYPE, Fp8Weight, scales_shape
from formats.kv_cache import check_kv_scale, find_kv_scales
from formats.layouts import LAYOUTS, decode_linear, is_quantized, tensor_names
from formats.packed import PackedWeight
from formats.weights import Weight, merge
from qkernels import QuantLinear
from qserve.model.attention import Attention
from qserve.model.decoder import Decoder, Layer, Mlp
from qserve.model.linear import FloatLinear, Linear, SplitLinear
from qserve.model.model_config import ModelConfig
from qserve.model.rope import cos_sin_table

logger = logging.getLogger(__name__)

# Tensors that older writers store although they follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
# dummy weights: activations stay in range through any number of layers
DUMMY_SCALE = 0.02


class WeightSource:
    """Named tensors of a checkpoint, with a record of which were used."""

    def __init__(self, consumer: CheckpointReader, config: ModelConfig) -> None:
        self.consumer = consumer
        self.quant = config.quant
        self._used: set[str] = set()
        self._mislabelled = 0  # linears whose zeros follow the other rule than the label says

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor. Raises CheckpointError where its shape is not `shape`."""
        if name not in self.consumer:
            raise CheckpointError(name, f"is missing from {self.reader.folder}")
        found = self.consumer.entries[name].shape
        if found != shape:
            raise CheckpointError(
                name, f"expected {list(shape)} from config.json, found {list(found)}"
            )
        self._used.add(name)
        return self.consumer.get(name)

    def is_quantized(self, module: str) -> bool:
        return is_quantized(module, self.consumer.entries)

    def stays_in_float(self, module: str) -> bool:
        """Does the configuration say that a module is not quantized?"""
        return self.quant is None or self.quant.scheme_for(module) is None

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        """A quantized linear's weight. Raises CheckpointError where its shape is not `shape`."""
        if self.quant is None:
            raise CheckpointError(
                module, "has quantized tensors such as qweight, but no quantization_config"
            )
        names = tensor_names(module, LAYOUTS[self.quant.method], self.consumer.entries)
        tensors = {field: self.consumer.get(name) for field, name in names.items()}
        self._used.update(names.values())
        weight = decode_linear(module, tensors, self.quant)
        if (weight.out_features, weight.in_features) != shape:
            raise CheckpointError(
                module,
                f"expected {list(shape)} from config.json,"
                f" found {[weight.out_features, weight.in_features]}",
            )
        if self.quant.method == "gptq" and gptq.is_mislabelled(
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
                scale = self.consumer.get(found[0])
                check_kv_scale(found[0], scale)
                scales[kind] = scale.float().reshape(())
        return scales

    def __contains__(self, name: str) -> bool:
        return name in self.consumer

    def audit(self, tied_head: bool) -> None:
        """Raise CheckpointError, with the names, where tensors were left over."""
        if self._mislabelled:
            logger.warning(
                "%s: checkpoint_format says that zeros are %s, in %d linears the data says"
                " otherwise; loaded as the data says",
                self.consumer.folder,
                self.quant.zeros,
                self._mislabelled,
            )
        left = {
            name
            for name in self.consumer.entries.keys() - self._used
            if not name.endswith(DERIVED_SUFFIXES) and not self._is_zero_bias(name)
        }
        if tied_head:
            left.discard("lm_head.weight")  # stored twice by some writers
        if left:
            some = ", ".join(sorted(left)[:4])
            raise CheckpointError(
                str(self.consumer.folder),
                f"{len(left)} tensors have no place in the model, among them {some}",
                "config.json and the weights do not belong together",
            )

    def _is_zero_bias(self, name: str) -> bool:
        """Old GPTQ writers gave every linear a bias, of zero where the model has none."""
        return name.endswith(".bias") and not self.consumer.get(name).any()


class DummySource:
    """Random weights in the shapes that are asked for; the same for the same seed."""

    def __init__(self, config: ModelConfig, device: torch.device, seed: int) -> None:
        self.quant = config.quant
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if "norm" in name:
            return torch.ones(shape, device=self.device)
        noise = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return noise.normal_(0, DUMMY_SCALE, generator=self._generator)

    def is_quantized(self, module: str) -> bool:
        return self.quant is not None and self.quant.scheme_for(module) is not None

    def stays_in_float(self, module: str) -> bool:
        return not self.is_quantized(module)

    def weight(self, module: str, shape: tuple[int, int]) -> Weight:
        scheme = self.quant.scheme_for(module)
        spec, device = scheme.weight, self.device
        sizes = {"device": device, "generator": self._generator}
        input_scale = None
        if scheme.activation is not None and not scheme.activation.dynamic:
            input_scale = torch.tensor(DUMMY_SCALE, device=device)
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

    def kv_scales(self, attention: str) -> dict[str, torch.Tensor]:
        return {}

    def audit(self, tied_head: bool) -> None:
        """Nothing can be left over."""


Source = WeightSource | DummySource


def load(
    config: ModelConfig,
    source: Source,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    progress: bool = True,
) -> Decoder:
    """Build the decoder. Raises CheckpointError on missing, leftover or misshapen tensors."""
    builder = _Builder(config, source, device, dtype)
    embedding = builder.float("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    numbers = tqdm(range(config.num_layers), desc="Loading layers", disable=not progress)
    layers = [builder.layer(number) for number in numbers]
    head: Linear
    if config.tied_head and not source.is_quantized("lm_head"):
        head = FloatLinear(embedding)
    else:
        head = builder.linear(["lm_head"], [config.vocab_size], config.hidden_size, bias=False)
    decoder = Decoder(
        config,
        embedding_VC=embedding,
        layers=layers,
        norm=builder.float("model.norm.weight", (config.hidden_size,)),
        head=head,
        cos_sin=cos_sin_table(config.rope, max_model_len, device),
    )
    source.audit(config.tied_head)
    return decoder


class _Builder:
    def __init__(
        self, config: ModelConfig, source: Source, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config, self.source, self.device, self.dtype = config, source, device, dtype

    def float(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.tensor(name, shape).to(self.device, self.dtype)

    def linear(self, modules: list[str], outputs: list[int], inputs: int, *, bias: bool) -> Linear:
        """One layer from the modules of a merged group.

        Members that the checkpoint quantizes differently stay apart. Raises CheckpointError where
        only some are quantized and the configuration does not say so.
        """
        quantized = {module for module in modules if self.source.is_quantized(module)}
        rest = [module for module in modules if module not in quantized]
        biases = [None] * len(modules)
        if bias:
            biases = self._each(modules, outputs, lambda m, n: (f"{m}.bias", (n,)))
        if not quantized:
            return FloatLinear(
                torch.cat(self._each(modules, outputs, lambda m, n: (f"{m}.weight", (n, inputs)))),
                torch.cat(biases) if bias else None,
            )
        if not all(self.source.stays_in_float(module) for module in rest):
            raise CheckpointError(
                ", ".join(modules),
                f"only {', '.join(sorted(quantized))} of this group is quantized",
            )
        if not rest:
            sizes = zip(modules, outputs, strict=True)
            parts = [self.source.weight(module, (n, inputs)) for module, n in sizes]
            try:
                merged = merge(parts, modules[0]) if len(parts) > 1 else parts[0]
            except CheckpointError as error:
                logger.info("%s stay apart: %s", ", ".join(modules), error.problem)
                layers = [self._quantized(w, b) for w, b in zip(parts, biases, strict=True)]
                return SplitLinear(layers)
            return self._quantized(merged, torch.cat(biases) if bias else None)
        layers = []
        for module, n, own_bias in zip(modules, outputs, biases, strict=True):
            if module in quantized:
                layers.append(self._quantized(self.source.weight(module, (n, inputs)), own_bias))
            else:
                layers.append(FloatLinear(self.float(f"{module}.weight", (n, inputs)), own_bias))
        return SplitLinear(layers)

    def _quantized(self, weight: Weight, bias: torch.Tensor | None) -> QuantLinear:
        return QuantLinear.for_inference(weight.to(self.device), bias, self.dtype, self.device)

    def layer(self, number: int) -> Layer:
        config, prefix = self.config, f"model.layers.{number}"
        q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
        hidden, inner = config.hidden_size, config.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        norms = {}
        if config.qk_norm:
            norms = {
                name: self.float(f"{attention}.{name}.weight", (config.head_dim,))
                for name in ("q_norm", "k_norm")
            }
        scales = {
            name: scale.to(self.device) for name, scale in self.source.kv_scales(attention).items()
        }
        return Layer(
            config,
            attention=Attention(
                config,
                window=config.windows[number],
                qkv_proj=self.linear(
                    [f"{attention}.{name}_proj" for name in "qkv"],
                    [q_size, kv_size, kv_size],
                    hidden,
                    bias=config.qkv_bias,
                ),
                o_proj=self.linear([f"{attention}.o_proj"], [hidden], q_size, bias=config.o_bias),
                **norms,
                **scales,
            ),
            mlp=Mlp(
                gate_up_proj=self.linear(
                    [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                    [inner, inner],
                    hidden,
                    bias=config.mlp_bias,
                ),
                down_proj=self.linear([f"{mlp}.down_proj"], [hidden], inner, bias=config.mlp_bias),
            ),
            input_norm=self.float(f"{prefix}.input_layernorm.weight", (hidden,)),
            post_norm=self.float(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        )

    def _each(
        self,
        modules: list[str],
        outputs: list[int],
        name_and_shape: Callable[[str, int], tuple[str, tuple[int, ...]]],
    ) -> list[torch.Tensor]:
        return [
            self.float(*name_and_shape(module, n))
            for module, n in zip(modules, outputs, strict=True)
        ]
