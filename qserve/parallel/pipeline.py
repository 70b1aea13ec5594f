"""The stages of a model whose layers are shared out, and what passes between them.

The first stage has the embedding, the norm before the head and the head, so that all tokens are
drawn there: hidden states go from stage to stage, and from the last back to the first. Knows
tensors, no layers. Legend: T tokens, C hidden size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

Work = dist.Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Our stage, and the ways to the one before and the one behind."""

    stage: int
    num_stages: int
    ranks: tuple[int, ...]  # of each stage, the one that we talk to
    ahead: dist.ProcessGroup  # from each stage to the next
    back: dist.ProcessGroup  # from the last to the first: on a way of its own, so nobody waits

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    def layers(self, num_layers: int) -> range:
        """Those of our stage: as many as the others', the first stage one less if it must be."""
        ends = self._ends(num_layers)
        return range(ends[self.stage], ends[self.stage + 1])

    def _ends(self, num_layers: int) -> list[int]:
        return [num_layers * stage // self.num_stages for stage in range(self.num_stages + 1)]

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Which stage has a layer; of the number behind the last, the last."""
        ends = self._ends(num_layers)
        return next((s for s in range(self.num_stages) if layer < ends[s + 1]), self.num_stages - 1)

    def connect(self, device: torch.device) -> None:
        """Pass a number round once.

        NCCL may connect two ranks at their first exchange, and waits there for both. In a step the
        first stage begins with what the last one sends, and others with what the first one does.
        """
        number = torch.zeros(1, device=device)
        if not self.is_first:
            self.receive(number)
        self.send(number).wait()
        if self.is_first:
            self.receive_last(number).wait()

    def receive(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Fill a tensor with what the stage before sends."""
        dist.irecv(x_TC, self.ranks[self.stage - 1], group=self.ahead).wait()
        return x_TC

    def pass_on(self, x: torch.Tensor) -> None:
        """Give a tensor of the first stage to all others, which it fills there."""
        if not self.is_first:
            self.receive(x)
        if self.stage < self.num_stages - 1:
            self.send(x).wait()

    def send(self, x_TC: torch.Tensor) -> Work:
        """Send to the next stage, or from the last to the first. Does not wait."""
        is_last = self.stage == self.num_stages - 1
        to = 0 if is_last else self.stage + 1
        group = self.back if is_last else self.ahead
        return dist.isend(x_TC.contiguous(), self.ranks[to], group=group)

    def receive_last(self, x_TC: torch.Tensor) -> Work:
        """Begin to fill a tensor with what the last stage sends to the first."""
        return dist.irecv(x_TC, self.ranks[-1], group=self.back)
