"""Pipeline: the stages of a model (runs of layers), and their communication.

The first stage also has the embedding, the final norm and the output head, so that all tokens are
sampled there: hidden states pass from stage to stage, and from the last back to the first. Legend:
T tokens, C hidden size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

Work = dist.Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's stage, and the process groups to its neighbours."""

    stage: int
    num_stages: int
    ranks: tuple[int, ...]  # the rank of each stage that this rank communicates with
    ahead: dist.ProcessGroup  # from each stage to the next
    back: dist.ProcessGroup  # from the last stage to the first; a separate group avoids deadlocks

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    def layers(self, num_layers: int) -> range:
        """Layers of this stage: equally many on all stages, with the remainder on later ones."""
        ends = self._ends(num_layers)
        return range(ends[self.stage], ends[self.stage + 1])

    def _ends(self, num_layers: int) -> list[int]:
        return [num_layers * stage // self.num_stages for stage in range(self.num_stages + 1)]

    def stage_of(self, layer: int, num_layers: int) -> int:
        """The stage of a layer; of the number after the last layer, the last stage."""
        ends = self._ends(num_layers)
        return next((s for s in range(self.num_stages) if layer < ends[s + 1]), self.num_stages - 1)

    def connect(self, device: torch.device) -> None:
        """Pass a number around once.

        NCCL may connect two ranks at their first exchange and blocks until both call it. In a step
        the first stage starts with the data of the last one, and others with the data of the first
        one.
        """
        number = torch.zeros(1, device=device)
        if not self.is_first:
            self.receive(number)
        self.send(number).wait()
        if self.is_first:
            self.receive_last(number).wait()

    def receive(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Receive a tensor from the previous stage into `x_TC`."""
        dist.irecv(x_TC, self.ranks[self.stage - 1], group=self.ahead).wait()
        return x_TC

    def pass_on(self, x: torch.Tensor) -> None:
        """Broadcast a tensor of the first stage to all others, where `x` is filled."""
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
        """Start to receive a tensor from the last stage on the first."""
        return dist.irecv(x_TC, self.ranks[-1], group=self.back)
