"""Pipeline: the pipeline stages of a model (consecutive layers), and their communication.

The first stage also has the embedding, the final norm and the LM head, so all tokens are sampled
there. Hidden states pass from stage to stage, and from the last stage back to the first.
T: tokens. C: hidden size.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

Work = dist.Work


def stage_layers(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a stage. Layers are divided evenly, later stages get one more."""
    return range(num_layers * stage // num_stages, num_layers * (stage + 1) // num_stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """This rank's stage, and the process groups to its neighbours."""

    stage: int
    num_stages: int
    ranks: tuple[int, ...]  # for each stage, the rank that this rank communicates with
    ahead: dist.ProcessGroup  # from each stage to the next
    back: dist.ProcessGroup  # from the last stage to the first; a separate group avoids deadlocks

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    def layers(self, num_layers: int) -> range:
        """Return the layers of this stage."""
        return stage_layers(self.stage, self.num_stages, num_layers)

    def stage_of(self, layer: int, num_layers: int) -> int:
        """Return the stage of a layer. `layer` may be `num_layers`: then it is the last stage."""
        stages = range(self.num_stages)
        found = (s for s in stages if layer in stage_layers(s, self.num_stages, num_layers))
        return next(found, self.num_stages - 1)

    def connect(self, device: torch.device) -> None:
        """Connect the stages by passing a number around once.

        NCCL may connect two ranks only at their first exchange, and then blocks until both call it.
        In a step this could deadlock: the stages do not start with the same exchange.
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
        """Broadcast a tensor from the first stage. On all other stages `x` is filled."""
        if not self.is_first:
            self.receive(x)
        if self.stage < self.num_stages - 1:
            self.send(x).wait()

    def send(self, x_TC: torch.Tensor) -> Work:
        """Send a tensor to the next stage, or from the last stage to the first. Does not wait."""
        is_last = self.stage == self.num_stages - 1
        to = 0 if is_last else self.stage + 1
        group = self.back if is_last else self.ahead
        return dist.isend(x_TC.contiguous(), self.ranks[to], group=group)

    def receive_last(self, x_TC: torch.Tensor) -> Work:
        """Start receiving a tensor from the last stage. Call on the first stage."""
        return dist.irecv(x_TC, self.ranks[-1], group=self.back)
