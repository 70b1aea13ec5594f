"""Medusa's heads (arXiv 2401.10774), and their drafter: one token per head.

Each head predicts from the target's last state, independently of the tokens of other heads. The
drafts are verified as those of other drafters, so this does not affect the output.

Suffixes of tensor names: D requests that draft, C hidden size, V vocabulary.
"""

import torch
from torch.nn import functional

from formats.errors import CheckpointError, InputError
from formats.heads.config import MEDUSA
from qserve.model.blocks.linear import Linear
from qserve.speculation.draft_step import DraftStep
from qserve.speculation.drafter import BuildContext
from qserve.speculation.heads.loading import HeadWeights, open_head


class MedusaHead(torch.nn.Module):
    """Residual blocks, then an output matrix."""

    def __init__(self, blocks: list[Linear], output: Linear) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)
        self.output = output

    def forward(self, hidden_DC: torch.Tensor) -> torch.Tensor:
        """Return logits [D, V]."""
        for block in self.blocks:
            hidden_DC = hidden_DC + functional.silu(block(hidden_DC))
        return self.output(hidden_DC)


class MedusaDrafter:
    """Head k drafts the token k + 1 positions after the newest token. See DeviceDrafter."""

    looks_ahead, aux_layers, attentions = False, (), ()
    first_kv_heads = ()
    reads_images = False
    extra_positions = 0

    def __init__(self, heads: list[MedusaHead]) -> None:
        self.heads = heads

    def propose(self, step: DraftStep) -> torch.Tensor:
        if not len(step.last_rows_D) or not step.num_drafts:  # kernels require at least one row
            return step.last_rows_D.new_zeros(len(step.last_rows_D), step.num_drafts)
        hidden_DC = step.hidden_TC[step.last_rows_D]
        drafts = [
            step.draw(head(hidden_DC), index)
            for index, head in enumerate(self.heads[: step.num_drafts])
        ]
        return torch.stack(drafts, 1)


def build(context: BuildContext) -> MedusaDrafter:
    """Build the drafter from a folder in Medusa's layout. Raises InputError or CheckpointError."""
    folder = open_head(context, MEDUSA)
    wanted, config = context.config.most_tokens, folder.config
    if wanted > config.num_heads:
        raise InputError(
            "--speculative-config num_speculative_tokens",
            f"expected at most {config.num_heads}, one per Medusa head, found {wanted}",
            "lower it, or leave it out",
        )
    target = context.target.config
    weights = HeadWeights(folder, context)
    C, V = target.hidden_size, target.vocab_size
    _check_sizes(weights, C, V)
    heads = [
        MedusaHead(
            [
                weights.linear(f"{number}.{layer}.linear", shape=(C, C))
                for layer in range(config.num_layers)
            ],
            weights.linear(f"{number}.{config.num_layers}", shape=(V, C)),
        )
        for number in range(config.num_heads)
    ]
    weights.audit()
    return MedusaDrafter(heads)


def _check_sizes(weights: HeadWeights, hidden_size: int, vocab_size: int) -> None:
    """Raise CheckpointError if the heads were trained for another model."""
    for name, found in weights.folder.linear_shapes().items():
        outs = hidden_size if name.endswith(".linear") else vocab_size
        if tuple(found) != (outs, hidden_size):
            raise CheckpointError(
                f"{weights.folder.folder}: {weights.folder.stored(f'{name}.weight')}",
                f"expected {[outs, hidden_size]} for this model, found {list(found)}",
                "use heads that were trained for this model",
            )
