"""The EAGLE head (arXiv 2401.15077; EAGLE-2 has the same weights). ChainDrafter runs it.

The first layer has no norm before attention. There is no final norm: the target's output matrix
reads the residual sum.

Suffixes of tensor names: T rows, C hidden size, V vocabulary.
"""

import torch
from torch.nn import functional

from formats.heads.config import EAGLE, EagleConfig
from qkernels.attention.cache import PagedKv
from qserve.model.blocks.attention import Attention, StepInputs
from qserve.model.blocks.layer import Layer
from qserve.model.blocks.linear import Linear
from qserve.model.blocks.norm import Norm
from qserve.model.blocks.rotary import Rotary
from qserve.model.decoder import Decoder
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.chain import ChainDrafter
from qserve.speculation.heads.loading import HeadWeights, ImageInputs, check_fits, open_head


class EagleHead(torch.nn.Module):
    """Maps the target's last state and a token to the next state."""

    def __init__(
        self,
        config: EagleConfig,
        *,
        embedding_VC: torch.Tensor,
        fc: Linear,
        layers: list[Layer],
        target: Decoder,
    ) -> None:
        super().__init__()
        self.config, self.fc = config, fc
        self.layers = torch.nn.ModuleList(layers)
        self.end = Norm(None, config.norm_eps)
        self.register_buffer("embedding", embedding_VC)
        self.logits = target.logits

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Attention of the layers, in order."""
        return tuple(layer.attention for layer in self.layers)

    def start(self, step: DraftStep) -> torch.Tensor:
        """Return the input of the target's output matrix."""
        return step.hidden_TC

    def forward(
        self,
        tokens_T: torch.Tensor,
        state_TC: torch.Tensor,
        step: StepInputs,
        caches: list[PagedKv],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next state [T, C] twice: as recurrent state, and as input of `logits`."""
        embedded_TC = functional.embedding(tokens_T, self.embedding)
        if step.embeds is not None:
            values_MC = step.embeds.values_MC.to(embedded_TC.dtype)
            embedded_TC = embedded_TC.index_copy(0, step.embeds.rows_M, values_MC)
        x, residual_TC = self.fc(torch.cat([embedded_TC, state_TC], -1)), None
        for layer, cache in zip(self.layers, caches, strict=True):
            x, residual_TC = layer(x, residual_TC, step, cache)
        _, total_TC = self.end(x, residual_TC, None)
        return total_TC, total_TC


def build(context: BuildContext) -> ChainDrafter:
    """Build the drafter from a folder in EAGLE's layout. Raises InputError or CheckpointError."""
    folder = open_head(context, EAGLE)
    check_fits(folder.config, context)
    weights = HeadWeights(folder, context)
    rotary = weights.rotary(folder.config)
    images = ImageInputs.of(folder.config, context, rotary)
    return ChainDrafter(
        load_head(weights, folder.config, rotary),
        reads_images=images.reads_images,
        ropes=images.ropes,
    )


def load_head(weights: HeadWeights, config: EagleConfig, rotary: Rotary) -> EagleHead:
    """Load the head. It uses the target's output matrix, even if the file contains a copy."""
    eps = config.norm_eps

    def attention_norm(number: int) -> Norm:
        if number == 0:
            return Norm(None, eps)
        return Norm(weights.tensor(f"layers.{number}.input_layernorm.weight"), eps)

    head = EagleHead(
        config,
        embedding_VC=weights.embedding(),
        fc=weights.linear("fc"),
        layers=[
            Layer(
                attention_norm=attention_norm(number),
                attention=weights.attention(config, number, rotary),
                mlp_norm=Norm(
                    weights.tensor(f"layers.{number}.post_attention_layernorm.weight"), eps
                ),
                mlp=weights.mlp(number),
            )
            for number in range(config.num_layers)
        ],
        target=weights.context.target,
    )
    weights.skip("lm_head.weight")
    weights.audit()
    return head
