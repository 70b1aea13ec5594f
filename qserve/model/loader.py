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
from formats.packed import PackedWeight
from qkernels import QuantLinear
from qserve.model.attention import Attention
from qserve.model.decoder import Decoder, Layer, Mlp
from qserve.model.linear import FloatLinear, Linear
from qserve.model.model_config import ModelConfig
from qserve.model.rope import cos_sin_table

logger = logging.getLogger(__name__)

# Tensors that older writers store although they follow from the config.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
# dummy weights: activations stay in range through any number of layers
DUMMY_SCALE = 0.02


class WeightSource:
    """Named tensors of a checkpoint, with a record of which were used."""

    def __init__(self, reader: CheckpointReader, config: ModelConfig) -> None:
        self.reader = reader
        self.quant = config.quant
        self._used: set[str] = set()

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
        return self.reader.get(name)

    def is_quantized(self, module: str) -> bool:
        return f"{module}.qweight" in self.reader

    def packed(self, module: str, shape: tuple[int, int]) -> PackedWeight:
        """A quantized linear's weight. Raises CheckpointError where its shape is not `shape`."""
        if self.quant is None:
            raise CheckpointError(f"{module}.qweight", "but config.json has no quantization_config")
        found = [name for name in gptq.TENSOR_NAMES if f"{module}.{name}" in self.reader]
        tensors = {name: self.reader.get(f"{module}.{name}") for name in found}
        self._used.update(f"{module}.{name}" for name in found)
        packed = gptq.decode(tensors, self.quant.scheme.weight, module)
        if (packed.out_features, packed.in_features) != shape:
            raise CheckpointError(
                module,
                f"expected {list(shape)} from config.json,"
                f" found {[packed.out_features, packed.in_features]}",
            )
        return packed

    def audit(self, tied_head: bool) -> None:
        """Raise CheckpointError, with the names, where tensors were left over."""
        left = {
            name
            for name in self.reader.entries.keys() - self._used
            if not name.endswith(DERIVED_SUFFIXES)
        }
        if tied_head:
            left.discard("lm_head.weight")  # stored twice by some writers
        if left:
            some = ", ".join(sorted(left)[:4])
            raise CheckpointError(
                str(self.reader.folder),
                f"{len(left)} tensors have no place in the model, among them {some}",
                "config.json and the weights do not belong together",
            )


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
        return self.quant is not None and module != "lm_head"

    def packed(self, module: str, shape: tuple[int, int]) -> PackedWeight:
        spec = self.quant.scheme.weight
        words = shape[1] * spec.bits // 32
        sizes = {"device": self.device, "generator": self._generator}
        # Uniform codes have a standard deviation of 2^bits / sqrt(12).
        scale = DUMMY_SCALE * 12**0.5 / 2**spec.bits
        groups = (shape[0], spec.num_groups(shape[1]))
        return PackedWeight(
            words_NW=torch.randint(-(2**31), 2**31, (shape[0], words), dtype=torch.int32, **sizes),
            scales_NG=torch.full(groups, scale, dtype=torch.float16, device=self.device),
            zeros_NG=torch.full(groups, spec.symmetric_zero, dtype=torch.uint8, device=self.device),
            spec=spec,
            in_features=shape[1],
        )

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
    if config.tied_head:
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
        """One layer from the modules of a merged group: all quantized, or all float."""
        quantized = {module for module in modules if self.source.is_quantized(module)}
        if quantized and quantized != set(modules):
            raise CheckpointError(
                ", ".join(modules),
                f"only {', '.join(sorted(quantized))} of this group is quantized",
            )
        merged_bias = None
        if bias:
            merged_bias = torch.cat(self._each(modules, outputs, lambda m, n: (f"{m}.bias", (n,))))
        if not quantized:
            return FloatLinear(
                torch.cat(self._each(modules, outputs, lambda m, n: (f"{m}.weight", (n, inputs)))),
                merged_bias,
            )
        parts = [self.source.packed(m, (n, inputs)) for m, n in zip(modules, outputs, strict=True)]
        packed = PackedWeight.merge(parts, modules[0]).to(self.device)
        layer = QuantLinear.from_packed(packed, bias=merged_bias)
        layer.prepare(self.dtype, self.device, release=True)
        return layer

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
