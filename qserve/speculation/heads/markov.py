"""DSpark's Markov head: adds a bias to a draft's logits that depends on the token before it.

Suffixes of tensor names:

    D: requests that draft
    C: hidden size
    R: rank
    V: vocabulary
    U: draft vocabulary
"""

import torch
from torch.nn import functional

from formats.heads import tensors as names
from formats.heads.block_config import BlockConfig
from qserve.model.blocks.linear import Linear
from qserve.speculation.heads.loading import HeadWeights


class MarkovHead(torch.nn.Module):
    """Embedding [V, R] of the token before (optionally gated or recurrent), and a matrix [U, R]."""

    def __init__(
        self, kind: str, embedding_VR: torch.Tensor, output: Linear, step: Linear | None
    ) -> None:
        """`step`: projection of the gate ("gated"), or of the recurrence ("rnn")."""
        super().__init__()
        self.kind, self.output, self.step = kind, output, step
        self.register_buffer("embedding", embedding_VR)

    def start(self, count: int) -> torch.Tensor:
        """Return the state [D, R] before a block."""
        return self.embedding.new_zeros(count, self.embedding.shape[1])

    def forward(
        self, tokens_D: torch.Tensor, read_DC: torch.Tensor, state_DR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (bias [D, U], next state) for the drafts after `tokens_D`."""
        x_DR = functional.embedding(tokens_D, self.embedding)
        if self.kind == "gated":
            x_DR = x_DR * torch.sigmoid(self.step(torch.cat([read_DC, x_DR], -1)))
        elif self.kind == "rnn":
            gate, new, out = self.step(torch.cat([state_DR, x_DR, read_DC], -1)).chunk(3, -1)
            share = torch.sigmoid(gate)
            state_DR = share * state_DR + (1 - share) * torch.tanh(new)
            x_DR = torch.tanh(out)
        return self.output(x_DR), state_DR


def load_markov(weights: HeadWeights, config: BlockConfig) -> MarkovHead | None:
    """Load the Markov head; return None if there is none."""
    if not config.markov_rank:
        return None
    step = names.MARKOV_STEPS.get(config.markov_type)
    return MarkovHead(
        config.markov_type,
        weights.tensor(f"{names.MARKOV_IN}.weight"),
        weights.linear(names.MARKOV_OUT),
        None if step is None else weights.linear(step),
    )
