"""Medusa's heads as a torch module, for training (arXiv 2401.10774).

Head k reads the target's last state of position i and predicts token i + 2 + k.

Legend: B windows, S tokens of a window, C hidden size, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


class ResidualBlock(nn.Module):
    """x + silu(W x + b). W starts at 0, so that the head starts as the target's output matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class MedusaModule(nn.Module):
    """All heads of a model; `tensors()` returns the names of published files."""

    def __init__(self, head_VC: torch.Tensor, num_heads: int, num_layers: int = 1) -> None:
        """`head_VC`: the target's output matrix, the initial value of each head."""
        super().__init__()
        V, C = head_VC.shape
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            last = nn.Linear(C, V, bias=False)
            last.weight.data.copy_(head_VC)
            # One block per layer; the authors' `[block] * num_layers` shares one block.
            blocks = [ResidualBlock(C) for _ in range(num_layers)]
            self.heads.append(nn.Sequential(*blocks, last))

    def forward(self, states_BSC: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the logits [B, S, V] of each head."""
        for head in self.heads:
            yield head(states_BSC)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of `medusa_lm_head.safetensors`."""
        return {
            name.removeprefix("heads."): tensor for name, tensor in self.heads.state_dict().items()
        }


def head_losses(
    heads: MedusaModule, states_BSC: torch.Tensor, target_BSV: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (loss, accuracy) of each head.

    The loss is the cross entropy with the target's distribution of the token that the head
    predicts. Accuracy is the fraction of rows whose most likely token equals the target's.
    """
    best_BS = target_BSV.argmax(-1)
    S = best_BS.shape[1]
    for number, logits in enumerate(heads(states_BSC)):
        shift = 1 + number
        seen = logits[:, : S - shift]
        wanted = target_BSV[:, shift:].float().softmax(-1)
        loss = -(wanted * seen.float().log_softmax(-1)).sum(-1).mean()
        yield loss, (seen.argmax(-1) == best_BS[:, shift:]).float().mean()
