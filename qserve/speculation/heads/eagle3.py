"""The EAGLE-3 head (arXiv 2503.01840). ChainDrafter runs it.

Suffixes of tensor names:

    T: rows
    C: hidden size
    F: input size of `fc`
    D: requests that draft
    V: vocabulary
"""

import logging

import torch
from torch.nn import functional

from formats.errors import InputError
from formats.heads import tensors as names
from formats.heads.config import EAGLE3, PEAGLE, EagleConfig
from formats.heads.folder import HeadFolder
from qkernels import ops
from qkernels.attention.cache import PagedKv
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear
from qserve.model.blocks.mlp import Mlp
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.chain import ChainDrafter
from qserve.speculation.heads.draft_vocabulary import DraftOutput
from qserve.speculation.heads.loading import HeadWeights, ImageInputs, check_fits, open_head

logger = logging.getLogger(__name__)


class FirstLayer(torch.nn.Module):
    """The first layer. The input of its attention is embedding and state, 2 * C wide."""

    def __init__(
        self,
        config: EagleConfig,
        *,
        input_norm_C: torch.Tensor,
        hidden_norm_C: torch.Tensor,
        attention: Attention,
        mlp_norm: Norm,
        mlp: Mlp,
    ) -> None:
        super().__init__()
        self.eps, self.norm_before_residual = config.norm_eps, config.norm_before_residual
        self.register_buffer("input_norm", input_norm_C)
        self.register_buffer("hidden_norm", hidden_norm_C)
        self.attention, self.mlp_norm, self.mlp = attention, mlp_norm, mlp

    def forward(
        self,
        tokens_T: torch.Tensor,
        embedding_VC: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        cache: PagedKv,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output, and the residual to which it will be added."""
        plan = self.attention.plan(state_TC.shape[0])
        if step.embeds is not None:  # use a table with one embedding per row of the step
            embedding_VC = functional.embedding(tokens_T, embedding_VC).index_copy(
                0, step.embeds.rows_M, step.embeds.values_MC.to(embedding_VC.dtype)
            )
            tokens_T = torch.arange(len(tokens_T), device=tokens_T.device)
        norms = self.input_norm, state_TC, self.hidden_norm, self.eps
        x, normed_TC = ops.embed_norms(tokens_T, embedding_VC, *norms, plan.input)
        residual_TC = normed_TC if self.norm_before_residual else state_TC
        x = self.attention(x, plan, step, cache)
        plan = self.mlp.plan(state_TC.shape[0])
        x, residual_TC = self.mlp_norm(x, residual_TC, plan.input)
        return self.mlp(x, plan), residual_TC


class Eagle3Head(torch.nn.Module):
    """Maps the target's auxiliary hidden states and a token to the next token's logits."""

    def __init__(
        self,
        config: EagleConfig,
        *,
        embedding_VC: torch.Tensor,
        fc: Linear,
        fc_norms: list[Norm],  # one per auxiliary hidden state, one for all of them, or none
        first: FirstLayer,
        others: list[Layer],
        norm: Norm,
        output: DraftOutput,
    ) -> None:
        super().__init__()
        self.config = config
        self.fc, self.first, self.norm, self.output = fc, first, norm, output
        self.others = torch.nn.ModuleList(others)
        self.fc_norms = torch.nn.ModuleList(fc_norms)
        self.register_buffer("embedding", embedding_VC)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of the layers, in order."""
        return (self.first.attention, *(layer.attention for layer in self.others))

    def fused(self, aux_states: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the head's first state [T, C] from the auxiliary hidden states, [T, C] each."""
        if self.config.fc_norm:
            pairs = zip(aux_states, self.fc_norms, strict=True)
            aux_states = tuple(norm(state, None, None)[0] for state, norm in pairs)
        aux_TF = torch.cat(aux_states, -1)
        if self.config.norm_before_fc:
            aux_TF, _ = self.fc_norms[0](aux_TF, None, None)
        return self.fc(aux_TF)

    def start(self, step: DraftStep) -> torch.Tensor:
        return self.fused(step.aux_states)

    def forward(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (recurrent state, input of `logits`), [T, C] each. Writes keys and values."""
        x, residual_TC = self.first(tokens_T, self.embedding, state_TC, step, caches[0])
        for layer, cache in zip(self.others, caches[1:], strict=True):
            x, residual_TC = layer(x, residual_TC, step, cache)
        read_TC, total_TC = self.norm(x, residual_TC, None)
        return (read_TC if self.config.norm_output else total_TC), read_TC

    def logits(self, read_DC: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, [D, V]; -inf for tokens the head lacks."""
        return self.output.spread(self.output(read_DC))


def build(context: BuildContext) -> ChainDrafter:
    """Build the drafter from a folder in any known layout. Raises InputError or CheckpointError."""
    folder = open_head(context, EAGLE3)
    config = folder.config
    check_fits(config, context)
    aux_layers = config.aux_layers(context.target.config.num_layers)
    log_head(folder, aux_layers)
    weights = HeadWeights(folder, context)
    rotary = weights.rotary(config)
    images = ImageInputs.of(config, context, rotary)
    return ChainDrafter(
        load_head(weights, config, rotary),
        aux_layers,
        reads_images=images.reads_images,
        ropes=images.ropes,
    )


def log_head(folder: HeadFolder, aux_layers: tuple[int, ...]) -> None:
    """Log the layout of an EAGLE-3 or P-EAGLE head, and the states that it reads."""
    config: EagleConfig = folder.config
    logger.info(
        "%s head %s: %s layout, %d draft tokens, states before layers %s%s",
        "P-EAGLE" if config.kind == PEAGLE else "EAGLE-3",
        folder.folder,
        config.layout,
        config.draft_vocab_size,
        ", ".join(map(str, aux_layers)),
        f" (config.json states {list(stated)})" if (stated := config.explicit_aux_layers) else "",
    )


def load_head(weights: HeadWeights, config: EagleConfig, rotary: Rotary) -> Eagle3Head:
    """Load the head. It uses the target's embedding and output matrix if it has none."""
    eps = config.norm_eps

    def norm(name: str) -> Norm:
        return Norm(weights.tensor(f"{name}.weight"), eps)

    fc_norms = []
    if config.fc_norm:
        fc_norms = [norm(f"fc_norm.{number}") for number in range(config.num_aux)]
    if config.norm_before_fc:
        fc_norms.append(norm("input_norm"))
    if len(fc_norms) > 1 and config.norm_before_fc:
        raise InputError(
            str(weights.folder.folder),
            "has both a norm per auxiliary hidden state and a norm for all of them",
            "set norm_before_fc to false in its config.json, or remove the other norms",
        )
    head = Eagle3Head(
        config,
        embedding_VC=weights.embedding(),
        fc=weights.linear("fc"),
        fc_norms=fc_norms,
        first=FirstLayer(
            config,
            input_norm_C=weights.tensor("layers.0.input_layernorm.weight"),
            hidden_norm_C=weights.tensor("layers.0.hidden_norm.weight"),
            attention=weights.attention(config, 0, rotary),
            mlp_norm=norm("layers.0.post_attention_layernorm"),
            mlp=weights.mlp(0),
        ),
        others=[
            Layer(
                attention_norm=norm(f"layers.{number}.input_layernorm"),
                attention=weights.attention(config, number, rotary),
                mlp_norm=norm(f"layers.{number}.post_attention_layernorm"),
                mlp=weights.mlp(number),
            )
            for number in range(1, config.num_layers)
        ],
        norm=Norm(weights.tensor(names.NORM), eps),
        output=DraftOutput.load(weights, config),
    )
    weights.audit()
    return head
