"""The MTP (multi-token prediction) layer of a model's checkpoint. ChainDrafter runs it.

Its equations are in formats/architecture/next_token.py. It is a decoder layer of the model's
family, with attention, and is sharded over ranks like the model's layers. If the checkpoint has
several MTP layers, only the first one is used, for all drafts: it has keys of all positions.

Suffixes of tensor names: T rows, C hidden size, D requests that draft, V vocabulary.
"""

import logging
from dataclasses import replace

import torch

from formats.architecture.columns import LAST_LAYER, DraftNames
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from formats.in_memory.weights import same_weight
from qkernels.attention.cache import PagedKv
from qserve.model import families
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import FloatLinear, GatheredLinear, Linear
from qserve.model.blocks.norm import Norm
from qserve.model.decoder import Decoder
from qserve.model.loading.dummy_source import DummySource
from qserve.model.loading.weight_source import WeightSource
from qserve.model.loading.weights import Source, Weights
from qserve.model.model_config import ModelConfig
from qserve.model.rank_shards import first_kv_heads
from qserve.model.tp_plan import TpPlan
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.chain import ChainDrafter

logger = logging.getLogger(__name__)


class MtpHead(torch.nn.Module):
    """Maps the model's last state and a token to the next state."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        embedding_norm: Norm,
        state_norm: Norm,
        projection: Linear,
        layer: Layer,
        norm: Norm,
        head: Linear,
    ) -> None:
        super().__init__()
        self.embedding, self.projection, self.layer = embedding, projection, layer
        self.embedding_norm, self.state_norm = embedding_norm, state_norm
        self.norm, self.head = norm, head

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of the layer."""
        return (self.layer.attention,)

    def start(self, step: DraftStep) -> torch.Tensor:
        """Return the input of the model's output matrix."""
        return step.hidden_TC

    def forward(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normed next state [T, C] twice: as recurrent state, and as `logits` input."""
        embedded_TC, _ = self.embedding_norm(self.embedding(tokens_T, step.positions_T), None, None)
        normed_TC, _ = self.state_norm(state_TC, None, None)
        x_TC = self.projection(torch.cat([embedded_TC, normed_TC], -1))
        x, residual_TC = self.layer(x_TC, None, step, caches[0])
        state_TC, _ = self.norm(x, residual_TC, None)
        return state_TC, state_TC

    def logits(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Return logits [D, V]."""
        return self.head(read_DC)


def build(context: BuildContext) -> ChainDrafter:
    """Build the drafter from the folder `model`, by default the served model's.

    Raises InputError or CheckpointError.
    """
    folder = context.config.model or context.target_folder
    config = ModelConfig.from_folder(
        folder, activation_bits=context.activation_bits, is_drafter=True
    )
    check_fits(config, context)
    prefixes = config.family.draft_layers(config.values)
    if not prefixes:
        key = config.family.draft_layers_key or config.family.draft_names.count_key
        raise InputError(
            context.config.subject,
            f"{folder} has no MTP layer: config.json "
            + (f"has no {key}" if key else f"is of {config.family.architecture}"),
            "use another method, such as ngram",
        )
    prefix = prefixes[0]
    layered = with_layer(config, prefix)
    if context.dummy_seed is None:
        reader = _reader(context, folder, prefix, config.family.draft_names)
        source: Source = WeightSource(reader, layered, context.device)
    else:
        source = DummySource(layered, context.device, context.dummy_seed)
    logger.info(
        "Drafts: %s of %s%s",
        prefix.removesuffix("."),
        folder,
        f"; {len(prefixes) - 1} more layers are not used" if len(prefixes) > 1 else "",
    )
    head = load_head(layered, source, prefix, config.family.draft_names, context)
    communicator = context.ranks.communicator
    size, rank = (1, 0) if communicator is None else (communicator.size, communicator.rank)
    return ChainDrafter(head, first_kv_heads=first_kv_heads(layered, size, rank)[-1:])


def with_layer(config: ModelConfig, prefix: str) -> ModelConfig:
    """Return the model's config with the MTP layer as the last layer.

    Its per-layer properties equal those of the last layer, except that it always has attention.
    """
    names = config.family.draft_names
    ropes, windows = config.ropes[-1:], config.windows[-1:]
    if not names.layer:
        return replace(
            config,
            num_layers=config.num_layers + 1,
            ropes=config.ropes + ropes,
            windows=config.windows + windows,
            values={**config.values, config.family.draft_layers_key: 0},
        )
    family = replace(
        config.family,
        layer=prefix + names.layer.removesuffix("."),
        draft_prefix="",
        draft_names=LAST_LAYER,
    )
    alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    return replace(
        config,
        family=family,
        num_layers=1,
        ropes=ropes,
        windows=windows,
        state_layers=(False,),
        values={**config.values, **alone},
    )


def check_fits(config: ModelConfig, context: BuildContext) -> None:
    """Raise CheckpointError if the layer belongs to another model."""
    target = context.target.config
    for key, found, expected in (
        ("architectures", config.family.architecture, target.family.architecture),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
        ("num_hidden_layers", config.num_layers, target.num_layers),
    ):
        if found != expected:
            raise CheckpointError(
                f"{context.config.model}: config.json {key}",
                f"expected {expected} to match the model, found {found}",
                "use a layer that was made for this model",
            )


def _reader(context: BuildContext, folder: str, prefix: str, names: DraftNames) -> CheckpointReader:
    """Return a reader of only the layer's tensors. Raises CheckpointError if there are none."""
    reader = CheckpointReader(folder)
    found = {name: entry for name, entry in reader.entries.items() if name.startswith(prefix)}
    if names.layer:  # skip other layers below the prefix
        layers = prefix + names.layer.partition(".")[0] + "."
        found = {
            name: entry
            for name, entry in found.items()
            if name.startswith(prefix + names.layer) or not name.startswith(layers)
        }
    if not found:
        raise CheckpointError(
            f"{folder}: {prefix}*",
            f"is missing: config.json lists this layer for {context.config.subject}, but the tool"
            " that wrote the folder omitted its tensors",
            "set model to a folder that has them, such as the float model's",
        )
    reader.entries = found
    return reader


def load_head(
    config: ModelConfig, source: Source, prefix: str, names: DraftNames, context: BuildContext
) -> MtpHead:
    """Load the layer. It shares the model's embedding and head if its own are missing or equal."""
    target, communicator = context.target, context.ranks.communicator
    tp_plan = TpPlan(config, communicator, context.ranks.experts)
    config = tp_plan.local(config)
    weights = Weights(
        config,
        source,
        device=context.device,
        dtype=context.dtype,
        max_model_len=context.max_model_len,
        progress=False,
        kernels=context.kernels,
        tp_plan=tp_plan,
    )
    C, eps = config.hidden_size, config.norm_eps
    number = config.num_layers - 1
    source.expect(prefix.removesuffix("."), weights.not_ahead(number))
    head = MtpHead(
        embedding=_embedding(weights, source, names.embedding and prefix + names.embedding, target),
        embedding_norm=Norm(weights.norm(prefix + names.embedding_norm, (C,)), eps),
        state_norm=Norm(weights.norm(prefix + names.state_norm, (C,)), eps),
        projection=weights.linear([prefix + names.projection], [C], 2 * C),
        layer=families.build_layer(config, weights.layer(number)),
        norm=Norm(weights.norm(prefix + names.last_norm, (C,)), eps),
        head=_head(weights, source, names.head and prefix + names.head, target),
    )
    weights.audit()
    return head


def _embedding(weights: Weights, source: Source, name: str, target: Decoder) -> Embedding:
    """Return the layer's embedding; the model's if the layer has none, or an equal one."""
    if not name or not source.has_linear(name.removesuffix(".weight")):
        return target.embedding
    own = Embedding(weights.embedding(name), target.embedding.factor, weights.vocabulary)
    return target.embedding if _are_one_table(own, target.embedding) else own


def _are_one_table(first: Embedding, second: Embedding) -> bool:
    if first.packed is None or second.packed is None:
        both_float = first.packed is None and second.packed is None
        return both_float and torch.equal(first.weight, second.weight)
    return same_weight(first.packed.packed, second.packed.packed) is None


def _head(weights: Weights, source: Source, name: str, target: Decoder) -> Linear:
    """Return the layer's output matrix; the model's if the layer has none, or an equal one."""
    if not name or not source.has_linear(name):
        return target.head
    head = weights.output_matrix(name)
    return target.head if _are_equal(head, target.head) else head


def _are_equal(first: Linear, second: Linear) -> bool:
    """Return True if two float matrices, or their shards, are equal."""
    if isinstance(first, GatheredLinear) and isinstance(second, GatheredLinear):
        return _are_equal(first.inner, second.inner)
    both_float = isinstance(first, FloatLinear) and isinstance(second, FloatLinear)
    return both_float and torch.equal(first.weight, second.weight)
