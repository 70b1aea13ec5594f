"""HeadWeights: loads the parts of a head from its folder. formats/heads defines names and shapes.

Suffixes of tensor names: C hidden size, V vocabulary, U draft vocabulary.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from formats.architecture.family import Family
from formats.architecture.rope_types import one_axis
from formats.errors import CheckpointError, InputError
from formats.families import FAMILIES
from formats.heads import tensors as names
from formats.heads.config import ROPE_KEYS as AXES_KEYS
from formats.heads.config import EagleConfig
from formats.heads.folder import HeadFolder
from formats.heads.layers_config import LayersConfig
from formats.quant_config import QuantConfig
from qserve.model.axis_ropes import AxisRopes
from qserve.model.blocks.attention import Attention
from qserve.model.blocks.linear import Linear
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.rotary import Rotary
from qserve.model.filled_config import filled_config
from qserve.model.loading.weight_source import WeightSource
from qserve.model.loading.weights import Weights
from qserve.model.rope import RopeConfig, cos_sin_table
from qserve.speculation.drafter import BuildContext

logger = logging.getLogger(__name__)

ROPE_KEYS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rope_theta", *AXES_KEYS, "max_position_embeddings"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceConfig:
    """Model config for Weights and WeightSource, for a head that has Llama's layers."""

    values: Mapping[str, Any]
    quant: QuantConfig | None
    family: Family = FAMILIES["LlamaForCausalLM"]
    tied_head: bool = False
    instead_of_head: str = ""
    num_layers: int = 0

    @property
    def sizes(self) -> dict[str, int | None]:
        return {}


class HeadWeights:
    """Loads a head's tensors and matrices by canonical name. Call `audit` last."""

    def __init__(self, folder: HeadFolder, context: BuildContext) -> None:
        self.folder, self.context = folder, context
        config = _SourceConfig(values={"num_hidden_layers": 0}, quant=folder.quant)
        self._source = WeightSource(folder, config, context.device)
        self._weights = Weights(
            config,
            self._source,
            device=context.device,
            dtype=context.dtype,
            max_model_len=context.max_model_len,
            progress=False,
            kernels=context.kernels,
        )

    def has(self, name: str) -> bool:
        return self.folder.has(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a float tensor. Its shape was checked when the folder was opened."""
        stored = self.folder.stored(name)
        return self._weights.tensor(stored, self.folder.entries[stored].shape)

    def linear(self, *members: str, shape: names.Shape | None = None) -> Linear:
        """Return one fused matrix of members with the same input.

        `shape`: shape of each member, if the config does not define it.
        """
        shapes = names.linears(self.folder.config)
        outs = [shapes[name][0] if shape is None else shape[0] for name in members]
        ins = shapes[members[0]][1] if shape is None else shape[1]
        return self._weights.linear(
            [self.folder.stored(name) for name in members],
            outs,
            ins,
            bias=self.has(f"{members[0]}.bias"),
        )

    def attention(
        self, config: LayersConfig, layer: int, rotary: Rotary, window: int | None = None
    ) -> Attention:
        prefix = f"layers.{layer}.self_attn"
        norms = {
            f"{each}_norm": self.tensor(f"{prefix}.{each}_norm.weight")
            for each in "qk"
            if self.has(f"{prefix}.{each}_norm.weight")
        }
        return Attention(
            config,
            window=window,
            rotary=rotary,
            qkv_proj=self.linear(*(f"{prefix}.{each}_proj" for each in "qkv")),
            o_proj=self.linear(f"{prefix}.o_proj"),
            kernel=(self.context.kernels or {}).get("attention"),
            **norms,
        )

    def mlp(self, layer: int) -> Mlp:
        prefix = f"layers.{layer}.mlp"
        return Mlp(
            up_proj=self.linear(f"{prefix}.gate_proj", f"{prefix}.up_proj"),
            down_proj=self.linear(f"{prefix}.down_proj"),
            activation="silu",
        )

    def rotary(self, config: LayersConfig) -> Rotary:
        """Return the rotary embedding for all served positions.

        The maximum position in a head's config is only its training length, not a limit.
        """
        stated = {key: config.values[key] for key in ROPE_KEYS if config.values.get(key)}
        stated |= {key: one_axis(stated[key]) for key in AXES_KEYS if key in stated}
        filled = filled_config({"model_type": "llama", **stated})
        rope = RopeConfig.from_dict(
            filled["rope_parameters"],
            dim=config.head_dim,
            max_position=max(filled["max_position_embeddings"], self.context.max_model_len),
        )
        return Rotary(cos_sin_table(rope, self.context.max_model_len, self.context.device))

    def audit(self) -> None:
        """Raise CheckpointError if a tensor of the folder was not used."""
        self._weights.audit()

    def skip(self, name: str) -> None:
        """Mark a tensor that is not needed as used, if the folder has it."""
        if self.has(name):
            stored = self.folder.stored(name)
            self._source.tensor(stored, self.folder.entries[stored].shape, integers=True)

    def embedding(self) -> torch.Tensor:
        """Return the head's embedding table [V, C]; the target's if the head has none."""
        if self.has(names.EMBEDDING):
            return self.tensor(names.EMBEDDING)
        return self.context.target.embedding.whole_table()

    def target_ids(self, config: LayersConfig) -> torch.Tensor | None:
        """Return the target's token id for each draft id, int64 [U]; None: the ids are equal."""
        self.skip(names.IN_DRAFT)
        if not self.has(names.TO_TARGET):
            if config.draft_vocab_size != config.vocab_size:
                raise CheckpointError(
                    f"{self.folder.folder}: {names.TO_TARGET}",
                    f"is missing, but the draft vocabulary has {config.draft_vocab_size} tokens and"
                    f" the model's {config.vocab_size}",
                    "use a head whose files are complete",
                )
            return None
        stored = self.folder.stored(names.TO_TARGET)
        shape = (config.draft_vocab_size,)
        offsets_U = self._source.tensor(stored, shape, integers=True).long()
        ids_U = offsets_U + torch.arange(len(offsets_U), device=offsets_U.device)
        if not bool(((ids_U >= 0) & (ids_U < config.vocab_size)).all()):
            raise CheckpointError(
                f"{self.folder.folder}: {stored}",
                f"maps to tokens outside the vocabulary of {config.vocab_size}",
                "save d2t again: it contains the offset that is added to each draft id",
            )
        if len(ids_U.unique()) != len(ids_U):
            raise CheckpointError(
                f"{self.folder.folder}: {stored}",
                "maps several draft ids to one token",
                "save d2t again: it contains the offset that is added to each draft id",
            )
        return ids_U


def open_head(context: BuildContext, kind: str) -> HeadFolder:
    """Open the folder of a head. Raises InputError if the head is not of this kind."""
    folder = HeadFolder(context.config.model)
    if folder.config.kind != kind:
        raise InputError(
            f"--speculative-config method {kind}",
            f"{folder.folder} contains a head of kind {folder.config.kind}",
            f"use method {folder.config.kind}",
        )
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """How an EAGLE head reads the positions of images."""

    reads_images: bool  # True: embeddings of images; False: embeddings of the placeholder token
    ropes: AxisRopes | None  # for positions with three axes; None: positions have one axis

    @classmethod
    def of(cls, config: EagleConfig, context: BuildContext, rotary: Rotary) -> "ImageInputs":
        """Choose by config.json and --speculative-config. Raises InputError."""
        target = context.target.config
        if target.vision is None:
            return cls(reads_images=False, ropes=None)
        asked = context.config.image_embeddings
        reads_images = config.reads_images if asked is None else asked
        if reads_images and config.hidden_size != target.hidden_size:
            if asked or config.image_embeddings:
                raise InputError(
                    f"{context.config.subject} image_embeddings",
                    f"the head's embeddings have size {config.hidden_size}, embeddings of images"
                    f" have size {target.hidden_size}",
                    "set it to false",
                )
            reads_images = False
        ropes = None
        axes = target.vision.axes
        if config.axis_pairs and axes is not None and not axes.counts_images:
            ropes = AxisRopes(
                [rotary], config.axis_pairs, is_interleaved=config.has_interleaved_axes
            )
        logger.info(
            "Images in %s: %s, positions of %s",
            context.config.model,
            "their embeddings" if reads_images else "embeddings of the placeholder token",
            "three axes" if ropes is not None else "one axis",
        )
        return cls(reads_images=reads_images, ropes=ropes)


def check_fits(config: LayersConfig, context: BuildContext) -> None:
    """Raise CheckpointError if a head was trained for another model."""
    target = context.target.config
    for key, found, expected in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if found != expected:
            raise CheckpointError(
                f"{context.config.model}: config.json {key}",
                f"expected {expected} to match the model, found {found}",
                "use a head that was trained for this model",
            )
