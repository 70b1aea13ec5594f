"""The layer that a model's checkpoint has for drafts (MTP). It drafts a chain.

formats/next_token.py has its equations. It is a decoder layer of the model's own family, shared out
over ranks as the model's layers are. Of several such layers the first is run again for each draft:
it alone then has keys of all positions. Legend: T rows, C hidden size, D requests that draft, V
vocabulary.
"""

import logging
from dataclasses import replace

import torch

from formats import next_token as names
from formats.checkpoint import CheckpointReader
from formats.errors import CheckpointError, InputError
from qkernels import ops
from qkernels.attention.cache import PagedKv
from qserve.model import families
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.embedding import Embedding
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import FloatLinear, GatheredLinear, Linear
from qserve.model.blocks.norm import RmsNorm
from qserve.model.decoder import Decoder
from qserve.model.dummy_source import DummySource
from qserve.model.model_config import ModelConfig
from qserve.model.sharing import Sharing
from qserve.model.weight_source import WeightSource
from qserve.model.weights import Source, Weights
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.chain import ChainDrafter

logger = logging.getLogger(__name__)


class MtpHead(torch.nn.Module):
    """The model's last state and a token to the next state."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        embedding_norm_C: torch.Tensor,
        state_norm_C: torch.Tensor,
        eps: float,
        projection: Linear,
        layer: Layer,
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        super().__init__()
        self.embedding, self.projection, self.layer = embedding, projection, layer
        self.norm, self.head, self.eps = norm, head, eps
        self.register_buffer("embedding_norm", embedding_norm_C)
        self.register_buffer("state_norm", state_norm_C)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Of the layer."""
        return (self.layer.attention,)

    def start(self, step: DraftStep) -> torch.Tensor:
        """What the model's head reads."""
        return step.hidden_TC

    def forward(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next state [T, C], twice: the normed one recurs, and logits are made of it."""
        embedded_TC = ops.rms_norm(self.embedding(tokens_T), self.embedding_norm, self.eps)
        normed_TC = ops.rms_norm(state_TC, self.state_norm, self.eps)
        x_TC = self.projection(torch.cat([embedded_TC, normed_TC], -1))
        x, residual_TC = self.layer(x_TC, None, step, caches[0])
        state_TC, _ = self.norm(x, residual_TC, None)
        return state_TC, state_TC

    def logits(self, read_DC: torch.Tensor) -> torch.Tensor:
        """[D, V]."""
        return self.head(read_DC)


def build(context: BuildContext) -> ChainDrafter:
    """From the model's own folder, or from `model`. Raises InputError or CheckpointError."""
    folder = context.config.model or context.target_folder
    config = ModelConfig.from_folder(folder)
    check_fits(config, context)
    prefixes = config.family.draft_layers(config.values)
    if not prefixes:
        key = config.family.draft_layers_key
        raise InputError(
            context.config.subject,
            f"{folder} has no layer for drafts: config.json "
            + (f"states no {key}" if key else f"is of {config.family.architecture}"),
            "use another method, as ngram",
        )
    prefix = prefixes[0]
    # The layer is the one behind the last, like it in everything that layers may differ in.
    layered = replace(
        config,
        num_layers=config.num_layers + 1,
        ropes=(*config.ropes, config.ropes[-1]),
        windows=(*config.windows, config.windows[-1]),
        values={**config.values, config.family.draft_layers_key: 0},
    )
    if context.dummy_seed is None:
        source: Source = WeightSource(_reader(context, folder, prefix), layered, context.device)
    else:
        source = DummySource(layered, context.device, context.dummy_seed)
    logger.info(
        "Drafts: %s of %s%s",
        prefix.removesuffix("."),
        folder,
        f"; {len(prefixes) - 1} more layers are not read" if len(prefixes) > 1 else "",
    )
    return ChainDrafter(load_head(layered, source, prefix, context))


def check_fits(config: ModelConfig, context: BuildContext) -> None:
    """Raise CheckpointError where the layer was made for another model."""
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
                f"expected {expected} as the model's, found {found}",
                "is this the model that the layer was made for?",
            )


def _reader(context: BuildContext, folder: str, prefix: str) -> CheckpointReader:
    """Of the layer's tensors alone. Raises CheckpointError where there are none."""
    reader = CheckpointReader(folder)
    found = {name: entry for name, entry in reader.entries.items() if name.startswith(prefix)}
    if not found:
        raise CheckpointError(
            f"{folder}: {prefix}*",
            f"config.json states this layer for {context.config.subject}, and its tensors are not"
            " here: the tool that wrote the folder left them out",
            "give a folder that has them as model, such as the float model's",
        )
    reader.entries = found
    return reader


def load_head(config: ModelConfig, source: Source, prefix: str, context: BuildContext) -> MtpHead:
    """The layer, with the model's embedding and head where it has none, or the same."""
    target, communicator = context.target, context.ranks.communicator
    sharing = Sharing(config, communicator)
    config = sharing.local(config)
    weights = Weights(
        config,
        source,
        device=context.device,
        dtype=context.dtype,
        max_model_len=context.max_model_len,
        progress=False,
        kernels=context.kernels,
        sharing=sharing,
    )
    C, eps = config.hidden_size, config.rms_norm_eps
    source.expect(prefix.removesuffix("."))
    head = MtpHead(
        embedding=_embedding(weights, source, prefix, target),
        embedding_norm_C=weights.norm(prefix + names.EMBEDDING_NORM, (C,)),
        state_norm_C=weights.norm(prefix + names.STATE_NORM, (C,)),
        eps=eps,
        projection=weights.linear([prefix + names.PROJECTION], [C], 2 * C),
        layer=families.build_layer(config, weights.layer(config.num_layers - 1)),
        norm=RmsNorm(weights.norm(prefix + names.LAST_NORM, (C,)), eps),
        head=_head(weights, source, prefix, target),
    )
    weights.audit()
    return head


def _embedding(weights: Weights, source: Source, prefix: str, target: Decoder) -> Embedding:
    name = prefix + names.EMBEDDING
    if name not in source:
        return target.embedding
    table_VC = weights.embedding(name)
    if torch.equal(table_VC, target.embedding.weight):
        return target.embedding
    return Embedding(table_VC, target.embedding.factor, weights.vocabulary)


def _head(weights: Weights, source: Source, prefix: str, target: Decoder) -> Linear:
    name = prefix + names.HEAD
    if f"{name}.weight" not in source and not source.is_quantized(name):
        return target.head
    head = weights.output_matrix(name)
    return target.head if _are_equal(head, target.head) else head


def _are_equal(first: Linear, second: Linear) -> bool:
    """Are two float matrices, or ranks' parts of them, the same?"""
    if isinstance(first, GatheredLinear) and isinstance(second, GatheredLinear):
        return _are_equal(first.inner, second.inner)
    both_float = isinstance(first, FloatLinear) and isinstance(second, FloatLinear)
    return both_float and torch.equal(first.weight, second.weight)
